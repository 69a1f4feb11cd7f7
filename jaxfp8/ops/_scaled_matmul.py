"""scaled_matmul: the FP8 GEMM, both operands with the contracting dimension last."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from . import _checks, _ffi
from ._dequantize import dequantize
from ._implementation import by_platform, selected
from ._transforms import merge_scale, merge_tensor, not_differentiable, split_groups

# What cuBLASLt may use while it multiplies; 32 MiB is its advice for Hopper.
_WORKSPACE_BYTES = 32 * 2**20
# cuBLASLt wants 16-byte rows in FP8.
_ALIGNMENT = 16

_E5M2 = np.dtype(jnp.float8_e5m2)


def scaled_matmul(
    a, b, a_scale_inv, b_scale_inv, *, bias=None, accumulator=None, out_dtype=jnp.bfloat16, precise=False
):
    """Product of two FP8 matrices, scaled back.

    Equivalent to, in f32 and rounded once at the end:

        ((a @ b.T) * (a_scale_inv * b_scale_inv) + bias + accumulator).astype(out_dtype)

    On NVIDIA GPUs cuBLASLt multiplies in FP8; elsewhere the codes are widened, which is exact, and multiplied with f32
    accumulation. With `K` products, `|error| <= K * eps * sum(|a_k b_k|)` before the last rounding,
    `eps = 2**-24`; about `2**-14` on Hopper with fast accumulation.

    Args:
        a: float8_e4m3fn or float8_e5m2 `[m, k]`.
        b: float8_e4m3fn or float8_e5m2 `[n, k]`.
        a_scale_inv: f32[] or f32[1].
        b_scale_inv: f32[] or f32[1].
        bias: bfloat16, float16 or float32 `[n]`, added to every row.
        accumulator: f32 `[m, n]`, added; with `out_dtype` float32 the GPU may add in place.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off (it exists on Hopper and Ada only).

    Returns:
        `[m, n]` of `out_dtype`.

    Raises:
        TypeError: an argument has another dtype; or the op is differentiated.
        ValueError: an argument has another shape.
    """
    op = "scaled_matmul"
    a = _checks.rank(op, "a", _checks.fp8(op, "a", a), 2)
    b = _checks.rank(op, "b", _checks.fp8(op, "b", b), 2)
    if a.shape[1] != b.shape[1]:
        raise ValueError(
            f"{op}: b: expected [n, k] with k = {a.shape[1]} as in a, got {b.shape}; both operands have the "
            "contracting dimension last"
        )
    operands = [a, b, _checks.scale(op, "a_scale_inv", a_scale_inv), _checks.scale(op, "b_scale_inv", b_scale_inv)]
    if bias is not None:
        operands.append(_checks.shape(op, "bias", _checks.high_precision(op, "bias", bias), (b.shape[0],)))
    if accumulator is not None:
        accumulator = _checks.array(op, "accumulator", accumulator)
        if accumulator.dtype != np.float32:
            raise TypeError(f"{op}: accumulator: expected float32, got {accumulator.dtype}")
        operands.append(_checks.shape(op, "accumulator", accumulator, (a.shape[0], b.shape[0])))
    if not isinstance(precise, (bool, np.bool_)):
        raise TypeError(f"{op}: precise: expected a bool, got {precise!r}")
    spec = _Spec(
        out_dtype=_checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION),
        precise=bool(precise),
        has_bias=bias is not None,
        has_accumulator=accumulator is not None,
    )
    return _scaled_matmul(spec, *operands)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is static about one product. Operands: a, b, a_scale_inv, b_scale_inv, then bias and accumulator if any."""

    out_dtype: np.dtype
    precise: bool
    has_bias: bool
    has_accumulator: bool

    def split(self, operands):
        """`(a, b, a_scale_inv, b_scale_inv, bias or None, accumulator or None)`."""
        rest = list(operands[4:])
        bias = rest.pop(0) if self.has_bias else None
        accumulator = rest.pop(0) if self.has_accumulator else None
        return (*operands[:4], bias, accumulator)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _scaled_matmul(spec, a, b, a_scale_inv, b_scale_inv, *rest):
    @not_differentiable("scaled_matmul")
    def run(a, b, a_scale_inv, b_scale_inv, *rest):
        return _groups(spec)(a[None], b[None], a_scale_inv, b_scale_inv, *(x[None] for x in rest))[0]

    return run(a, b, a_scale_inv, b_scale_inv, *rest)


@functools.cache
def _groups(spec):
    """Canonical form: a `[g, m, k]`, b `[g, n, k]`, scales `[1]` or `[g]`, bias `[g, n]`, accumulator `[g, m, n]`."""

    def default(*operands):
        matmul = _convert_multiply_dot if selected() == "xla" else _widened
        return matmul(spec, *spec.split(operands))

    def cpu(*operands):
        # bfloat16 has half of f32's bytes, and newer processors multiply it natively.
        return _widened(spec, *spec.split(operands), widen=lambda codes: dequantize(codes, 1.0, jnp.bfloat16))

    def cuda(*operands):
        return _cublaslt(spec, *spec.split(operands))

    call = custom_vmap(by_platform(default, cpu=cpu, cuda=cuda))

    @call.def_vmap
    def _(axis_size, in_batched, *operands):
        a, b = operands[:2]
        groups, m = a.shape[1:3] if in_batched[0] else a.shape[:2]
        if groups == 1 and in_batched[0] and not any(in_batched[1:]) and not spec.has_accumulator:
            # One b for the whole batch: a single taller GEMM.
            out = call(a.reshape(1, axis_size * m, a.shape[3]), b, *operands[2:])
            return out.reshape(axis_size, 1, m, b.shape[1]), True
        merged = [
            merge_scale(axis_size, batched, x, groups) if i in (2, 3) else merge_tensor(axis_size, batched, x)
            for i, (x, batched) in enumerate(zip(operands, in_batched, strict=True))
        ]
        return split_groups(axis_size, groups, call(*merged)), True

    return call


def _finish(spec, product, a_scale_inv, b_scale_inv, bias, accumulator):
    """Scales, adds and rounds an f32 product `[g, m, n]`."""
    out = product * (a_scale_inv * b_scale_inv)[:, None, None]
    if bias is not None:
        out = out + bias[:, None, :].astype(jnp.float32)
    if accumulator is not None:
        out = out + accumulator
    return out.astype(spec.out_dtype)


def _dot(a, b):
    """`[g, m, k]` by `[g, n, k]` in f32."""
    if a.shape[0] == 1:  # XLA:CPU multiplies matrices faster than batches of one
        return lax.dot_general(a[0], b[0], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)[None]
    return lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _to_f32(codes):
    """By a cast: on most platforms XLA fuses it. Not to bfloat16, whose transposed products XLA:CPU does not have."""
    return codes.astype(jnp.float32)


def _widened(spec, a, b, a_scale_inv, b_scale_inv, bias, accumulator, widen=_to_f32):
    """Codes in a wider dtype, exact, and a dot with f32 accumulation."""
    return _finish(spec, _dot(widen(a), widen(b)), a_scale_inv, b_scale_inv, bias, accumulator)


def _convert_multiply_dot(spec, a, b, a_scale_inv, b_scale_inv, bias, accumulator):
    """The pattern that XLA's GPU compiler rewrites to an FP8 GEMM: convert, multiply by the scale, dot."""
    a = a.astype(jnp.float32) * a_scale_inv[:, None, None]
    b = b.astype(jnp.float32) * b_scale_inv[:, None, None]
    one = jnp.ones((1,), jnp.float32)
    return _finish(spec, _dot(a, b), one, one, bias, accumulator)


def _cublaslt(spec, a, b, a_scale_inv, b_scale_inv, bias, accumulator):
    """One custom call; what cuBLASLt does not take is padded, or added afterwards."""
    g, m, k = a.shape
    n = b.shape[1]
    if a.dtype == b.dtype == _E5M2 or 0 in (g, m, n, k):
        return _widened(spec, a, b, a_scale_inv, b_scale_inv, bias, accumulator)

    # The epilogue takes one bias for all groups, in the output's dtype (bfloat16 for float32); and an f32 accumulator
    # where the output is f32. Otherwise the GEMM returns f32 and XLA fuses the rest into one pass.
    bias_dtype = jnp.float16 if spec.out_dtype == np.float16 else jnp.bfloat16
    bias_inside = bias is not None and g == 1 and bias.dtype == bias_dtype and accumulator is None
    accumulator_inside = accumulator is not None and bias is None and spec.out_dtype == np.float32
    finished = (bias is None or bias_inside) and (accumulator is None or accumulator_inside)

    pad_m, pad_n, pad_k = (-d % _ALIGNMENT for d in (m, n, k))
    operands = [
        jnp.pad(a, ((0, 0), (0, pad_m), (0, pad_k))),
        jnp.pad(b, ((0, 0), (0, pad_n), (0, pad_k))),
        a_scale_inv,
        b_scale_inv,
    ]
    aliases = None
    if bias_inside:
        operands.append(jnp.pad(bias[0], (0, pad_n)))
    if accumulator_inside:
        aliases = {len(operands): 0}
        operands.append(jnp.pad(accumulator, ((0, 0), (0, pad_m), (0, pad_n))))
    out_dtype = spec.out_dtype if finished else jnp.float32
    out, _ = _ffi.call(
        "scaled_matmul",
        [((g, m + pad_m, n + pad_n), out_dtype), ((_WORKSPACE_BYTES,), jnp.uint8)],
        *operands,
        aliases=aliases,
        precise=spec.precise,
        has_bias=bias_inside,
        has_accumulator=accumulator_inside,
    )
    out = out[:, :m, :n]
    if finished:
        return out
    one = jnp.ones((1,), jnp.float32)
    return _finish(spec, out, one, one, bias, accumulator)
