"""scaled_matmul: the FP8 GEMM, both operands with the contracting dimension last."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import _tpu
from . import _checks, _ffi, _shapes
from ._primitive import ONE, Op
from ._quantize import widening_on_cpu
from ._shapes import ProductSpec, bias_operands, rescaled

# The workspace of cuBLASLt, in bytes: NVIDIA's advice for Hopper, more than Ada needs.
# XLA lends the memory to other steps of the program.
WORKSPACE_BYTES = 32 * 2**20
# cuBLASLt wants 16-byte rows in FP8.
ALIGNMENT = 16

E5M2 = np.dtype(jnp.float8_e5m2)


def scaled_matmul(
    a: ArrayLike,
    b: ArrayLike,
    a_scale_inv: ArrayLike,
    b_scale_inv: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    accumulator: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    precise: bool = False,
    batch: int | None = None,
    contracting: int = 1,
    narrow_sums: bool = False,
    a_t: ArrayLike | None = None,
    b_t: ArrayLike | None = None,
) -> jax.Array:
    """Multiply two FP8 matrices and scale back.

    Equivalent to, in f32 and rounded once at the end:

        out = (a @ b.mT) * (a_scale_inv * b_scale_inv) + bias + accumulator
        out = out.astype(out_dtype)

    Where `a_scale_inv * b_scale_inv` is not a normal number, the scales multiply one
    after the other: `(a @ b.mT) * a_scale_inv * b_scale_inv`.

    On NVIDIA GPUs cuBLASLt multiplies in FP8; elsewhere the codes are widened, which is
    exact, and multiplied with f32 accumulation: with `K` products,
    `|error| <= K * 2**-24 * sum(|a_k b_k|)` before the last rounding. The tensor cores
    of Ada and Hopper add with 13 bits, in steps of 16 and 32 products (docs/numerics.md
    has the bound).

    Args:
        a: float8_e4m3fn or float8_e5m2 `[..., m, k]`.
        b: float8_e4m3fn or float8_e5m2 `[..., n, k]`.
        a_scale_inv: f32[] or f32[1].
        b_scale_inv: f32[] or f32[1].
        bias: bfloat16, float16 or float32 `[..., n]`, added to every row.
        accumulator: f32 `[..., m, n]`, added; with `out_dtype` float32 the GPU may add
            in place.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off. On Ada and Hopper the tensor cores then
            hand their sums to f32 at intervals, in place of once at the end; bits that
            a step drops stay lost. Elsewhere it changes nothing.
        batch: the number of leading dimensions that a and b share. m and n are then any
            numbers of dimensions; by default m and n are one dimension each.
        contracting: the number of dimensions that k stands for.
        narrow_sums: adds the parts of the result that the TPUs of a mesh have in
            `out_dtype`, where they hold parts of k: half of the bytes between devices
            for bfloat16, and a second rounding. By default TPUs add in f32; other
            devices add in `out_dtype` anyway.
        a_t, b_t: a and b as `[..., k, m]` and `[..., k, n]`, if another product reads
            the operands in that layout. On one device a_t and b_t are not read. On a
            mesh, if a or b has to be gathered, a_t or b_t is gathered in its place, so
            that only one layout crosses devices.

    Returns:
        `[..., m, n]` of `out_dtype`.

    Raises:
        TypeError: an argument has another dtype; or the op is differentiated.
        ValueError: an argument has another shape.
    """
    op = "scaled_matmul"
    a, b, leading, m, n, _ = _checks.product(op, a, b, batch, contracting)
    operands = [
        a,
        b,
        _checks.scale(op, "a_scale_inv", a_scale_inv),
        _checks.scale(op, "b_scale_inv", b_scale_inv),
    ]
    operands += bias_operands(op, bias, (*leading, *n))
    if accumulator is not None:
        accumulator = _checks.array(op, "accumulator", accumulator)
        if accumulator.dtype != np.float32:
            raise TypeError(
                f"{op}: accumulator: expected float32, got {accumulator.dtype}; cast "
                "it first"
            )
        operands.append(
            _checks.shape(op, "accumulator", accumulator, (*leading, *m, *n))
        )
    spec = _Spec(
        out_dtype=_checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION),
        precise=_checks.flag(op, "precise", precise),
        has_bias=bias is not None,
        batch=len(leading),
        rows=len(m),
        contracting=contracting,
        has_accumulator=accumulator is not None,
        has_a_t=a_t is not None,
        has_b_t=b_t is not None,
        narrow_sums=_checks.flag(op, "narrow_sums", narrow_sums),
    )
    return _scaled_matmul(
        *operands, *(x for x in (a_t, b_t) if x is not None), spec=spec
    )[0]


@dataclasses.dataclass(frozen=True)
class _Spec(ProductSpec):
    """The static part of one product: which of the operands bias, accumulator, a_t and
    b_t follow the first four.

    `narrow_sums` says in what dtype TPUs add their parts of the result.
    """

    has_accumulator: bool
    has_a_t: bool
    has_b_t: bool
    narrow_sums: bool

    def split(self, operands):
        """Return `(a, b, a_scale_inv, b_scale_inv, bias or None, accumulator or
        None)`.
        """
        rest = list(operands[4:])
        bias = rest.pop(0) if self.has_bias else None
        accumulator = rest.pop(0) if self.has_accumulator else None
        return (*operands[:4], bias, accumulator)


def to_f32(codes):
    """Widen by a cast to f32, which XLA fuses on most platforms. XLA:CPU has no
    transposed products of bfloat16.

    Programs for TPUs multiply the codes as they are.
    """
    return codes if _tpu.is_target() else codes.astype(jnp.float32)


def _spaced(scale):
    """Space scales `[s]` as `[s, 4]`: cuBLASLt reads each at 16 bytes. `[1]` stays: XLA
    aligns buffers.
    """
    return (
        scale
        if scale.shape[0] == 1
        else lax.broadcast_in_dim(scale, (scale.shape[0], 4), (0,))
    )


def _finish(spec, out, bias, accumulator, vmap_dims):
    """Add the bias and the accumulator to a scaled product of whole tensors, and round
    it to `out_dtype`.
    """
    out = spec.add_bias(out, bias, vmap_dims)
    return ((out if accumulator is None else out + accumulator).astype(spec.out_dtype),)


def _is_rewritten(a, b, vmap_dims):
    """Return whether XLA has an FP8 product of these operands: one pair of scales, and
    not E5M2 twice.
    """
    return vmap_dims == 0 and not a.dtype == b.dtype == E5M2


def _pattern(*operands, vmap_dims, spec, dtype):
    """Multiply by the pattern of `by_xla`, with operands of `dtype`."""
    a, b, a_scale_inv, b_scale_inv, bias, accumulator = spec.split(operands)
    wide = a.astype(dtype), b.astype(dtype)
    scales_inside = _is_rewritten(a, b, vmap_dims)
    if scales_inside:
        wide = (
            x * lax.broadcast(_scalar(scale, dtype), x.shape)
            for x, scale in zip(wide, operands[2:4], strict=True)
        )
    # XLA's word for cuBLASLt's fast accumulation is the precision of the dot.
    precision = lax.Precision.HIGHEST if spec.precise else lax.Precision.DEFAULT
    out = spec.dot(*wide, vmap_dims, dtype, precision)
    if not scales_inside:
        # Multiply by one factor: two would be two launches, and XLA's products have no
        # rule for scales that flush.
        out = out * _shapes.spread(a_scale_inv * b_scale_inv, out.shape)
    return _finish(spec, out, bias, accumulator, vmap_dims)


def _scalar(scale, dtype):
    """Convert an f32[1] scale as XLA needs it in the pattern.

    If the conversion to bfloat16 here meets XLA's conversion back to f32, XLA drops
    both and hands cuBLASLt the f32 scale, not rounded (`xla_allow_excess_precision`,
    which is on by default). The barrier keeps a reshape from coming between them.
    """
    return lax.optimization_barrier(scale.reshape(())).astype(dtype)


class _ScaledMatmul(Op):
    name = "scaled_matmul"

    def names(self, a, b, *rest, spec):
        leading, m, n, k = spec.names(b)
        operands = [leading + m + k, leading + n + k, ONE, ONE]
        operands += [leading + n] * spec.has_bias + [
            leading + m + n
        ] * spec.has_accumulator
        operands += [leading + k + m] * spec.has_a_t + [leading + k + n] * spec.has_b_t
        return operands, [leading + m + n]

    def dtypes(self, *operands, spec):
        return [spec.out_dtype]

    def added(self, spec):
        return range(4, 4 + spec.has_bias + spec.has_accumulator)

    def second_layouts(self, spec):
        first = 4 + spec.has_bias + spec.has_accumulator
        positions = [
            position for position, has in enumerate((spec.has_a_t, spec.has_b_t)) if has
        ]
        return {position: first + i for i, position in enumerate(positions)}

    def reference(self, *operands, vmap_dims, spec, widen=to_f32):
        """Widen the codes, which is exact, and multiply whole tensors with f32
        accumulation.
        """
        a, b, a_scale_inv, b_scale_inv, bias, accumulator = spec.split(operands)
        # XLA adds the parts of a product that a mesh has in the dtype of the dot.
        is_narrow = spec.narrow_sums and _tpu.devices.value in ("mesh", "unknown")
        dtype = spec.out_dtype if is_narrow else jnp.float32
        out = spec.dot(widen(a), widen(b), vmap_dims, dtype).astype(jnp.float32)
        out = rescaled(
            out,
            a_scale_inv,
            b_scale_inv,
            lambda scale: _shapes.spread(scale, out.shape),
        )
        return _finish(spec, out, bias, accumulator, vmap_dims)

    def tpu(self, *operands, vmap_dims, spec, devices):
        """Multiply by both halves of a pair apart, such as the kernels of gate and
        up.
        """
        multiply = functools.partial(super().tpu, vmap_dims=vmap_dims, devices=devices)
        a, b, *scales, bias, accumulator = spec.split(operands)
        leading = vmap_dims + spec.batch
        columns, contracted = (
            b.shape[leading : -spec.contracting],
            b.shape[-spec.contracting :],
        )
        if accumulator is None and _tpu.are_apart(columns, devices):
            biases = [()] * 2 if bias is None else zip(_tpu.halves(bias))
            parts = [
                multiply(a, kernel, *scales, *half, spec=spec)[0]
                for kernel, half in zip(_tpu.halves(b, leading), biases, strict=True)
            ]
            # The product of `narrow_sums` is the gradient of a kernel.
            return [_tpu.joined(parts, is_gradient=spec.narrow_sums)]
        if accumulator is None and bias is None and _tpu.are_apart(contracted, devices):
            in_f32 = dataclasses.replace(
                spec, contracting=1, out_dtype=np.dtype(np.float32)
            )
            pairs = zip(_tpu.halves(a), _tpu.halves(b), strict=True)
            gate, up = (multiply(*halves, *scales, spec=in_f32)[0] for halves in pairs)
            return [(gate + up).astype(spec.out_dtype)]
        return multiply(*operands, spec=spec)

    def cpu(self, *operands, vmap_dims, spec):
        """Widen to bfloat16: it has half of f32's bytes, and newer processors multiply
        it natively.
        """
        return self.reference(
            *operands, vmap_dims=vmap_dims, spec=spec, widen=widening_on_cpu()
        )

    def cuda(self, *operands, vmap_dims, spec):
        """Make one custom call on groups: a `[g, m, k]`, b `[g, n, k]`. XLA adds the
        terms that cuBLASLt does not.
        """
        a, b, a_scale_inv, b_scale_inv, bias, accumulator = spec.split(operands)
        # 1. Merge the dimensions to groups of matrices. No tensor core multiplies E5M2
        #    by E5M2, and cuBLASLt refuses
        # empty operands: leave both to XLA.
        a, b, shape = spec.groups(a, b, vmap_dims)
        (*groups, m, k), n = a.shape, b.shape[-2]
        g = math.prod(groups)
        if a.dtype == b.dtype == E5M2 or 0 in (g, m, n, k):
            return self.reference(*operands, vmap_dims=vmap_dims, spec=spec)

        # 2. The epilogue takes one bias for all groups, in the output's dtype (bfloat16
        #    for float32), and an f32
        # accumulator where the output is f32. Otherwise the GEMM returns f32 and XLA
        # fuses the rest into one pass.
        bias_dtype = jnp.float16 if spec.out_dtype == np.float16 else jnp.bfloat16
        bias_inside = (
            bias is not None
            and g == 1
            and bias.dtype == bias_dtype
            and accumulator is None
        )
        accumulator_inside = (
            accumulator is not None and bias is None and spec.out_dtype == np.float32
        )
        finished = (bias is None or bias_inside) and (
            accumulator is None or accumulator_inside
        )

        # 3. Pad every size to the alignment; zeros add nothing to a sum.
        pad_m, pad_n, pad_k = (-d % ALIGNMENT for d in (m, n, k))
        scales = (
            _spaced(_shapes.group_scales(scale, vmap_dims))
            for scale in (a_scale_inv, b_scale_inv)
        )
        call_operands = [
            _shapes.pad(a, pad_m, pad_k),
            _shapes.pad(b, pad_n, pad_k),
            *scales,
        ]
        if bias_inside:
            call_operands.append(_shapes.pad(bias.reshape(n), pad_n))
        if accumulator_inside:
            call_operands.append(
                _shapes.pad(accumulator.reshape(*groups, m, n), pad_m, pad_n)
            )
        # 4. Multiply, cut off the padding and add the terms that the epilogue did not
        #    take.
        dtype, aliases = (
            spec.out_dtype if finished else jnp.float32,
            {4: 0} if accumulator_inside else None,
        )
        results = [
            ((*groups, m + pad_m, n + pad_n), dtype),
            ((WORKSPACE_BYTES,), jnp.uint8),
        ]
        out, _ = _ffi.call(
            "scaled_matmul",
            results,
            *call_operands,
            aliases=aliases,
            precise=spec.precise,
            has_bias=bias_inside,
            has_accumulator=accumulator_inside,
        )
        out = out[..., :m, :n].reshape(shape)
        return (out,) if finished else _finish(spec, out, bias, accumulator, vmap_dims)

    def by_xla(self, *operands, vmap_dims, spec):
        """Write the pattern that XLA's GPU compiler rewrites to FP8 products: convert,
        multiply by the scale, dot.

        XLA rewrites the product in the dtype of its operands. With float32 operands a
        bfloat16 result would take another pass for its conversion and the bias; so on
        GPUs the pattern has the dtype bfloat16 if the result has. On other platforms
        bfloat16 operands would be rounded, so the pattern stays in float32.
        """
        in_f32 = functools.partial(
            _pattern, vmap_dims=vmap_dims, spec=spec, dtype=jnp.float32
        )
        narrow = spec.out_dtype == jnp.bfloat16 and not spec.has_accumulator
        if not (narrow and _is_rewritten(operands[0], operands[1], vmap_dims)):
            return in_f32(*operands)
        in_bf16 = functools.partial(
            _pattern, vmap_dims=vmap_dims, spec=spec, dtype=jnp.bfloat16
        )
        return lax.platform_dependent(*operands, cuda=in_bf16, default=in_f32)

    def batch_first(self, run, operands, batch_dims, vmap_dims, spec):
        """Merge a batch of a alone, or of b alone, into its rows; make a batch with
        shared scales a batch dimension.
        """
        # 1. Find the only operand that is batched, alone or with its second layout.
        batched = {i for i, d in enumerate(batch_dims) if d is not None}
        second = self.second_layouts(spec)
        position = next(
            (
                i
                for i in (0, 1)
                if batched == {i} | ({second[i]} if i in second else set())
            ),
            None,
        )
        # 2. Terms that are added have no room for more rows. Batched scales need the
        #    rule of all ops.
        if (
            position is None
            or spec.has_accumulator
            or (position == 1 and spec.has_bias)
        ):
            return (
                None
                if batched & {2, 3}
                else self._share_scales(run, operands, batch_dims, vmap_dims, spec)
            )
        # 3. Make the batch the first dimension of m, or of n, in both layouts.
        leading, operands = vmap_dims + spec.batch, list(operands)
        operands[position] = jnp.moveaxis(
            operands[position], batch_dims[position], leading
        )
        if position in second:
            i = second[position]
            operands[i] = jnp.moveaxis(
                operands[i], batch_dims[i], leading + spec.contracting
            )
        # 4. The result has the batch before m, or before n.
        if position == 0:
            spec = dataclasses.replace(spec, rows=spec.rows + 1)
        return run(*operands, vmap_dims=vmap_dims, spec=spec), [
            leading + (spec.rows if position == 1 else 0)
        ]

    def _share_scales(self, run, operands, batch_dims, vmap_dims, spec):
        """Make the batch a batch dimension of a, b and the operands that are added; all
        examples share the scales.
        """
        (size,) = {
            x.shape[d]
            for x, d in zip(operands, batch_dims, strict=True)
            if d is not None
        }

        def batched(x, d):
            if d is None:
                x, d = jnp.broadcast_to(x, (size, *x.shape)), 0
            return jnp.moveaxis(x, d, vmap_dims)

        operands = [
            x if i in (2, 3) else batched(x, d)
            for i, (x, d) in enumerate(zip(operands, batch_dims, strict=True))
        ]
        return run(
            *operands,
            vmap_dims=vmap_dims,
            spec=dataclasses.replace(spec, batch=spec.batch + 1),
        ), [vmap_dims]


_scaled_matmul = _ScaledMatmul()
