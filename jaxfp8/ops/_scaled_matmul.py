"""scaled_matmul: the FP8 GEMM, both operands with the contracting dimension last."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _checks, _ffi
from ._dequantize import dequantize_groups
from ._implementation import selected
from ._primitive import grouped_op

# What cuBLASLt may use while it multiplies; 32 MiB is its advice for Hopper.
_WORKSPACE_BYTES = 32 * 2**20
# cuBLASLt wants 16-byte rows in FP8.
_ALIGNMENT = 16

_E5M2 = np.dtype(jnp.float8_e5m2)
_ONE = np.ones((1,), np.float32)


def scaled_matmul(
    a, b, a_scale_inv, b_scale_inv, *, bias=None, accumulator=None, out_dtype=jnp.bfloat16, precise=False
):
    """Product of two FP8 matrices, scaled back.

    Equivalent to, in f32 and rounded once at the end:

        ((a @ b.mT) * (a_scale_inv * b_scale_inv) + bias + accumulator).astype(out_dtype)

    On NVIDIA GPUs cuBLASLt multiplies in FP8; elsewhere the codes are widened, which is exact, and multiplied with f32
    accumulation. With `K` products, `|error| <= K * eps * sum(|a_k b_k|)` before the last rounding,
    `eps = 2**-24`; about `2**-14` on Hopper with fast accumulation.

    Args:
        a: float8_e4m3fn or float8_e5m2 `[..., m, k]`.
        b: float8_e4m3fn or float8_e5m2 `[..., n, k]`.
        a_scale_inv: f32[] or f32[1].
        b_scale_inv: f32[] or f32[1].
        bias: bfloat16, float16 or float32 `[..., n]`, added to every row.
        accumulator: f32 `[..., m, n]`, added; with `out_dtype` float32 the GPU may add in place.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off (it exists on Hopper and Ada only).

    Returns:
        `[..., m, n]` of `out_dtype`.

    Raises:
        TypeError: an argument has another dtype; or the op is differentiated.
        ValueError: an argument has another shape.
    """
    op = "scaled_matmul"
    a = _checks.matrices(op, "a", _checks.fp8(op, "a", a))
    b = _checks.matrices(op, "b", _checks.fp8(op, "b", b))
    *leading, m, k = a.shape
    n = b.shape[-2]
    if b.shape != (*leading, n, k):
        needed = ", ".join(map(str, (*leading, "n", k)))
        raise ValueError(
            f"{op}: b: expected [{needed}] to go with a{list(a.shape)}, got {b.shape}; both operands have the "
            "contracting dimension last"
        )
    operands = [a, b, _checks.scale(op, "a_scale_inv", a_scale_inv), _checks.scale(op, "b_scale_inv", b_scale_inv)]
    if bias is not None:
        operands.append(_checks.shape(op, "bias", _checks.high_precision(op, "bias", bias), (*leading, n)))
    if accumulator is not None:
        accumulator = _checks.array(op, "accumulator", accumulator)
        if accumulator.dtype != np.float32:
            raise TypeError(f"{op}: accumulator: expected float32, got {accumulator.dtype}")
        operands.append(_checks.shape(op, "accumulator", accumulator, (*leading, m, n)))
    if not isinstance(precise, (bool, np.bool_)):
        raise TypeError(f"{op}: precise: expected a bool, got {precise!r}")
    spec = _Spec(
        out_dtype=_checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION),
        precise=bool(precise),
        has_bias=bias is not None,
        has_accumulator=accumulator is not None,
        rewritten_by_xla=selected() == "xla",
    )
    g = math.prod(leading)
    tensors = (2, 2, None, None, *([1] if spec.has_bias else []), 2)  # how many dimensions belong to the matrix
    operands = [
        x if rank is None else x.reshape(g, *x.shape[x.ndim - rank :])
        for x, rank in zip(operands, tensors, strict=False)
    ]
    return _groups(*operands, spec=spec)[0].reshape(*leading, m, n)


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is static about one product. Operands: a, b, a_scale_inv, b_scale_inv, then bias and accumulator if any."""

    out_dtype: np.dtype
    precise: bool
    has_bias: bool
    has_accumulator: bool
    rewritten_by_xla: bool

    def split(self, operands):
        """`(a, b, a_scale_inv, b_scale_inv, bias or None, accumulator or None)`."""
        rest = list(operands[4:])
        bias = rest.pop(0) if self.has_bias else None
        accumulator = rest.pop(0) if self.has_accumulator else None
        return (*operands[:4], bias, accumulator)


def _finish(spec, product, a_scale_inv, b_scale_inv, bias, accumulator):
    """Scales, adds and rounds an f32 product `[g, m, n]`."""
    scale_inv = a_scale_inv * b_scale_inv
    out = product * lax.broadcast_in_dim(scale_inv, (scale_inv.shape[0], *product.shape[1:]), (0,))
    if bias is not None:
        out = out + bias[:, None, :].astype(jnp.float32)
    if accumulator is not None:
        out = out + accumulator
    return out.astype(spec.out_dtype)


def _dot(a, b):
    """`[g, m, k]` by `[g, n, k]` in f32."""
    if a.shape[0] > 1:
        return lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    # Not a batch of one: XLA:CPU multiplies matrices faster.
    out = lax.dot_general(a, b, (((2,), (2,)), ((), ())), preferred_element_type=jnp.float32)
    return out.reshape(1, a.shape[1], b.shape[1])


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
    return _finish(spec, _dot(a, b), _ONE, _ONE, bias, accumulator)


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
    return _finish(spec, out, _ONE, _ONE, bias, accumulator)


def _results(a, b, *rest, spec):
    del rest
    return [((a.shape[0], a.shape[1], b.shape[1]), spec.out_dtype)]


def _reference(*operands, spec):
    matmul = _convert_multiply_dot if spec.rewritten_by_xla else _widened
    return (matmul(spec, *spec.split(operands)),)


def _cpu(*operands, spec):
    one = jnp.asarray(_ONE)

    def widen(codes):  # bfloat16 has half of f32's bytes, and newer processors multiply it natively
        return dequantize_groups(codes, one, dtype=np.dtype(jnp.bfloat16))[0]

    return (_widened(spec, *spec.split(operands), widen=widen),)


def _cuda(*operands, spec):
    return (_cublaslt(spec, *spec.split(operands)),)


def _taller(run, operands, batched, *, spec):
    """One b for the whole batch: a single taller GEMM."""
    a, b = operands[:2]
    if not batched[0] or any(batched[1:]) or spec.has_accumulator or a.shape[1] != 1:
        return None
    size, _, m, k = a.shape
    (out,) = run(a.reshape(1, size * m, k), b, *operands[2:])
    return [out.reshape(size, 1, m, b.shape[1])], [0]


# a `[g, m, k]`, b `[g, n, k]`, scales f32 `[1]` or `[g]`, bias `[g, n]`, accumulator `[g, m, n]` -> `[g, m, n]`.
_groups = grouped_op(
    "scaled_matmul",
    results=_results,
    reference=_reference,
    cpu=_cpu,
    cuda=_cuda,
    is_scale=(False, False, True, True, False, False),
    merge=_taller,
)
