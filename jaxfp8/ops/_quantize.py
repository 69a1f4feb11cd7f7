"""quantize: FP8 codes at a given scale, and the amax, in one read; dequantize: the
values of codes.

count_saturated_and_flushed: how many elements quantize loses.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES, _scaling, decode, encode, is_saturated_or_flushed
from . import _checks, _ffi, _shapes, _support
from ._primitive import ONE, Op, dims

# The custom call gives a sum for each run of this many rows (common/column_sums.h); XLA
# adds the sums up.
_SUMMED_ROWS = 128


def quantize(
    x: ArrayLike,
    scale: ArrayLike,
    dtype: DTypeLike,
    *,
    amax: ArrayLike | None = None,
    with_amax: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Quantize `x` and compute its amax, with one read of `x`.

    Equivalent to, with `y = x.astype(f32) * scale`:

        data = jnp.clip(y, -FP8_MAX, FP8_MAX).astype(dtype)  # NaN where x is not finite
        amax = jnp.maximum(amax, jnp.max(jnp.abs(x)))        # NaN counts as inf

    y is rounded once, to nearest, ties to even. Finite values saturate at FP8_MAX (448
    for float8_e4m3fn, 57344 for float8_e5m2), also when the product overflows; an Inf
    or NaN in `x` gives a NaN code in both formats.

    Args:
        x: bfloat16, float16 or float32, any shape.
        scale: f32[] or f32[1], the factor of x.
        dtype: float8_e4m3fn or float8_e5m2.
        amax: f32[] or f32[1], not negative: the amax so far; 0 by default. The op
            raises it in place, so that with a zero out of another op, such as
            `ops.delayed_scales`, the quantization is a single launch on a GPU.
        with_amax: whether to compute the amax.

    Returns:
        `(data, amax)`: data of `dtype` with the shape of x; amax f32, of the shape of
        the argument `amax`, else f32[], or None without `with_amax`.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; or the op is
            differentiated.
        ValueError: scale or amax has another shape.
    """
    x = _checks.high_precision("quantize", "x", x)
    data, _, amax = Quantize.quantize(x, scale, (), amax, dtype, with_amax=with_amax)
    return data, amax


class Quantization(Op):
    """The base of the ops that quantize: what they compute from x and `more`, in one or
    both layouts.

    The primitive takes `(x, scale, *more, *amax_so_far)`. The results are data; data_t
    if `transpose`; the amax if `with_amax`, at least `amax_so_far` where that is given;
    and the sums over rows if `column_sums`, which needs `transpose`.

    Such an op is a function in jnp, from x and `more` to f32 `[..., *m, *n]`: where no
    kernel fuses this function and the quantization, it runs before the quantization.

    Attributes:
        dtype: the dtype of the codes.
        transpose, with_amax, column_sums: whether these are results.
        rows, cols: the numbers of dimensions that m and n stand for; `quantize` has
            none.
        amax_place: the place of the amax among the results of the custom call.
    """

    dtype: np.dtype
    transpose: bool = True
    with_amax: bool = True
    column_sums: bool = False
    rows: int = 1
    cols: int = 1
    amax_place = 1

    # What a subclass defines ----------------------------------------------------------

    def columns(self):
        """Return the names of the dimensions that n stands for."""
        return dims("col", self.cols)

    def operand_parts(self, row, col):
        """Return the names of the dimensions of x and of `more` after the batch, in
        parts, given those of the codes.
        """
        return [(row, col)]

    def produce(self, x, *more):
        """Compute the values to quantize in jnp."""
        return x

    def extras(self):
        """Return further operands of the custom call."""
        return []

    # What all share -------------------------------------------------------------------

    @classmethod
    def quantize(cls, x, scale, more, amax, dtype, **options):
        """Check the arguments that all quantizations take, and bind the primitive; the
        options are the fields of the op.

        Returns:
            `(data, data_t, amax)`, the amax in the shape of the argument; None for
            data_t without `transpose` and for the amax without `with_amax`. With
            `column_sums` also the sums.
        """
        scale, amax_so_far = _checks.scale(cls.name, "scale", scale), []
        if amax is not None:
            amax_so_far.append(_checks.scale(cls.name, "amax", amax))
        op = cls(_checks.dtype(cls.name, "dtype", dtype, FP8_DTYPES), **options)
        data, *rest = op(x, scale, *more, *amax_so_far)
        data_t = rest.pop(0) if op.transpose else None
        raised = None
        if op.with_amax:
            raised = rest.pop(0).reshape(() if amax is None else jnp.shape(amax))
        return data, data_t, raised, *rest

    def dtypes(self, *operands):
        f32 = [jnp.float32] * (self.with_amax + self.column_sums)
        return [self.dtype] * (1 + self.transpose) + f32

    def names(self, x, scale, *ranks):
        row, col = dims("row", self.rows), self.columns()
        arrays = []
        # An operand without a batch is one for all groups.
        for rank, parts in zip((x, *ranks), self.operand_parts(row, col), strict=False):
            arrays.append((dims("batch", rank - sum(map(len, parts))), *parts))
        x_names, *more = arrays
        amax_so_far = [ONE] * (len(ranks) - len(more))
        batch = x_names[0]
        results = [(batch, row, col), (batch, col, row)][: 1 + self.transpose]
        results += [ONE] * self.with_amax
        # The sums lack the rows, so a mesh that cuts rows adds up those of its devices.
        results += [(batch, col)] * self.column_sums
        return [x_names, ONE, *more, *amax_so_far], results

    def split(self, x, scale, *rest):
        """Return `(x, *more)`, and the scale with `amax_so_far`."""
        count = len(self.operand_parts((), ())) - 1
        return (x, *rest[:count]), (scale, *rest[count:])

    def quantized(self, x, scale, *amax_so_far):
        """Quantize in jnp: `[data, data_t, amax, sums]`, without the results that are
        not asked for.
        """
        results = [encode(x, _shapes.stretch(scale, x), self.dtype)]
        if self.transpose:
            results.append(_shapes.transpose(results[0], self.rows, self.cols))
        if self.with_amax:
            amax = _shapes.abs_max(x, self.vmap_dims)
            results.append(_shapes.raise_amax(amax, *amax_so_far))
        if self.column_sums:
            first = x.ndim - self.rows - self.cols
            axes = tuple(range(first, first + self.rows))
            results.append(jnp.sum(x, axis=axes, dtype=jnp.float32))
        return results

    def reference(self, *operands):
        # The values stay in f32, as in the kernel: another rounding would give other
        # codes.
        arrays, scalars = self.split(*operands)
        return self.quantized(self.produce(*arrays), *scalars)

    def cuda(self, *operands):
        """Make the custom call of this op, in its canonical form; it raises the amax in
        place.
        """
        # 1. Merge the dimensions. What all groups of a vmapped index share is repeated
        #    for them.
        types, shape = self.results(*operands), operands[0].shape
        names, _ = self.parts(operands)
        batch = names[0][0]
        vmapped = math.prod(shape[: self.vmap_dims])
        groups = math.prod(shape[self.vmap_dims :][: len(batch)])
        is_shared = self.vmap_dims > 0 and groups != 1
        arrays, results = self.in_groups(operands, types)
        for i, (first, *_) in enumerate(names):
            if is_shared and first != batch:
                arrays[i] = jnp.repeat(arrays[i], groups, axis=0)
        (x, *more), (scale, *amax_so_far) = self.split(*arrays)
        # f32 [0] stands for the amax that is no operand, or no result. The amax is
        # raised in the operand's buffer: another buffer would need a copy first, one
        # more launch on a GPU.
        amax_type = (scale.size * self.with_amax,), jnp.float32
        aliases = {2: self.amax_place}
        if not amax_so_far:
            amax_so_far, aliases = [jnp.zeros((0,), jnp.float32)], None
        # 2. Call.
        results = results[: 1 + self.transpose]
        if self.column_sums:
            *leading, m, n = results[0][0]
            results += [((*leading, -(-m // _SUMMED_ROWS), n), jnp.float32)]
        results.insert(self.amax_place, amax_type)
        outputs = _ffi.call(
            self.name,
            results,
            *(x, scale, *amax_so_far, *more, *self.extras()),
            aliases=aliases,
            **self.attributes(),
        )
        # 3. Order the results as those of the op.
        amax = outputs.pop(self.amax_place)
        if self.column_sums:
            outputs[-1] = jnp.sum(outputs[-1], axis=-2)
        if self.with_amax:
            if is_shared:
                # The groups of a vmapped index have one amax together.
                amax = _scaling.abs_max(amax.reshape(vmapped, groups), axis=1)
            if aliases and not groups:
                amax = operands[-1]  # without groups it was not raised
            outputs.insert(1 + self.transpose, amax)
        return [x.reshape(t.shape) for x, t in zip(outputs, types, strict=True)]


class Quantize(Quantization):
    name = "quantize"
    transpose: bool = False
    cpu = Quantization.cuda

    def names(self, x, *ranks):
        parts = (), dims("x", x)
        return [parts, *[ONE] * len(ranks)], [parts] + [ONE] * self.with_amax


def dequantize(data: ArrayLike, scale_inv: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Compute the values of FP8 codes.

    Equivalent to `(data.astype(f32) * scale_inv).astype(dtype)`. A NaN result is the
    quiet NaN without sign.

    Args:
        data: float8_e4m3fn or float8_e5m2, any shape.
        scale_inv: f32[] or f32[1], the factor of the codes.
        dtype: bfloat16, float16 or float32.

    Returns:
        An array of `dtype` with the shape of `data`.

    Raises:
        TypeError: data, scale_inv or dtype has another dtype; or the op is
            differentiated.
        ValueError: scale_inv has another shape.
    """
    data = _checks.fp8("dequantize", "data", data)
    scale_inv = _checks.scale("dequantize", "scale_inv", scale_inv)
    dtype = _checks.dtype("dequantize", "dtype", dtype, _checks.HIGH_PRECISION)
    return _Dequantize(dtype)(data, scale_inv)[0]


class _Dequantize(Op):
    name = "dequantize"
    dtype: np.dtype  # of the values

    def names(self, data, scale_inv):
        names = (), dims("x", data)
        # Without vmapped dimensions one scale serves all groups, so the first dimension
        # may count as groups.
        if data > 1 and self.vmap_dims == 0:
            names = tuple(zip(names[1]))
        return [names, ONE], [names]

    def dtypes(self, data, scale_inv):
        return [self.dtype]

    def reference(self, data, scale_inv):
        return (decode(data, _shapes.stretch(scale_inv, data), self.dtype),)


def widening_on_cpu():
    """Return a conversion of codes to bfloat16 by one custom call, for the programs of
    other ops on CPUs.

    bfloat16 has half of f32's bytes, and newer processors multiply it natively.
    """
    dtype = np.dtype(jnp.bfloat16)
    if _support.why_disabled("dequantize"):
        return lambda data: data.astype(dtype)
    unit = lax.full((1,), 1.0, np.float32)
    return lambda data: _Dequantize(dtype).cpu(data, unit)[0]


def count_saturated_and_flushed(
    x: ArrayLike, scale: ArrayLike, dtype: DTypeLike
) -> jax.Array:
    """Count the elements of `x * scale` that saturate in `dtype`, and those that become
    zero.

    With `y = x.astype(f32) * scale` an element is saturated where `abs(y) > FP8_MAX`:
    an Inf is saturated, a NaN is not. An element is flushed where x is not zero and its
    code, as of `quantize`, is zero.

    XLA computes the counts on every platform, in one read of `x`.

    Args:
        x: bfloat16, float16 or float32, any shape.
        scale: f32[] or f32[1], the factor of x.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        f32[2], the numbers of saturated and of flushed elements, exact up to 2**24.

    Raises:
        TypeError: x, scale or dtype has another dtype.
        ValueError: scale has another shape.
    """
    op = "count_saturated_and_flushed"
    x = jnp.atleast_1d(_checks.high_precision(op, "x", x))
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    masks = is_saturated_or_flushed(x, _shapes.stretch(scale, x), dtype)
    # Rows are counted in integers, which hold the counts of a row, and both counts by
    # one reduction: for two XLA would write the product of every element to memory.
    counts = lax.reduce(
        tuple(mask.astype(jnp.uint32) for mask in masks),
        (np.uint32(0),) * 2,
        lambda a, b: tuple(map(lax.add, a, b)),
        (x.ndim - 1,),
    )
    return jnp.stack([jnp.sum(count.astype(jnp.float32)) for count in counts])
