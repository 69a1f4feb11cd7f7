"""quantize: FP8 codes at a given scale, and the amax, in one read; dequantize: the
values of codes.

count_saturated_and_flushed: how many elements quantize loses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES, decode, encode, is_saturated_or_flushed
from . import _checks, _ffi, _shapes, _support
from ._primitive import ONE, Op, dims

_COUNTS = dims("whole_count", 1)  # a dimension that no mesh cuts
_MAX_ROW = 2**16 - 1  # elements that half of a 32-bit word can count


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
    """The base of `quantize` and of producers.

    Attributes:
        dtype: the dtype of the codes.
        transpose, with_amax, column_sums: whether these are results.
        rows, cols: the numbers of dimensions that m and n stand for; `quantize` has
            none.
    """

    dtype: np.dtype
    transpose: bool = True
    with_amax: bool = True
    column_sums: bool = False
    rows: int = 1
    cols: int = 1

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

    def call(
        self,
        results,
        groups,
        scale,
        amax_so_far,
        *more,
        place=1,
        batch=1,
        **attributes,
    ):
        """Make one custom call that quantizes groups `[g, ...]`, or one group without
        g, and raises amaxes in place.

        Args:
            results: `(shape, dtype)` of the results but the amax.
            groups: the tensor in canonical form.
            scale: f32 `[*vmapped, 1]`.
            amax_so_far: the amax to raise, f32 `[*vmapped, 1]`, in a list; empty where
                there is none.
            *more: further operands of the custom call.
            place: the number of results before the amax.
            batch: the number of groups for each index of the vmapped dimensions.
            **attributes: the attributes of the custom call.

        Returns:
            `(results, amax)`: the results but the amax, and in a list the amax
            f32 `[*vmapped, 1]`, if `with_amax`.
        """
        vmapped = scale.shape[:-1]
        # In the canonical form f32 [0] stands for the amax that is no operand, or no
        # result. The amax is raised in the operand's buffer. Another buffer would need
        # a copy first, one more launch on a GPU.
        if amax_so_far:
            amax = _shapes.group_scales(*amax_so_far, len(vmapped), batch)
            aliases = {2: place}
        else:
            amax, aliases = jnp.zeros((0,), jnp.float32), None
        scales = _shapes.group_scales(scale, len(vmapped), batch)
        amax_type = (scales.size * self.with_amax,), jnp.float32
        outputs = _ffi.call(
            self.name,
            [*results[:place], amax_type, *results[place:]],
            *(groups, scales, amax, *more),
            aliases=aliases,
            **attributes,
        )
        amaxes = outputs.pop(place)
        if not self.with_amax:
            return outputs, []
        if amax_so_far and not batch:  # without groups no amax was raised
            return outputs, amax_so_far
        return outputs, [_shapes.vmapped_amaxes(amaxes, vmapped, batch)]


class Quantize(Quantization):
    name = "quantize"
    transpose: bool = False
    reference = Quantization.quantized

    def names(self, x, *scalars):
        x = dims("x", x)
        return [x, *[ONE] * len(scalars)], [x, *[ONE] * self.with_amax]

    def cpu(self, x, scale, *amax_so_far):
        groups = _shapes.merge(x, self.vmap_dims)
        results = [(groups.shape, self.dtype)]
        (data,), amax = self.call(results, groups, scale, amax_so_far)
        return [data.reshape(x.shape), *amax]


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
        return [dims("x", data), ONE], [dims("x", data)]

    def dtypes(self, data, scale_inv):
        return [self.dtype]

    def reference(self, data, scale_inv):
        return (decode(data, _shapes.stretch(scale_inv, data), self.dtype),)

    def cpu(self, data, scale_inv):
        # Without vmapped dimensions one scale serves all groups, so the first dimension
        # may count as groups.
        groups = data
        if self.vmap_dims or data.ndim < 2:
            groups = _shapes.merge(data, self.vmap_dims)
        (out,) = _ffi.call(
            "dequantize",
            [(groups.shape, self.dtype)],
            groups,
            _shapes.group_scales(scale_inv, self.vmap_dims),
        )
        return (out.reshape(data.shape),)


def widening_on_cpu():
    """Return a conversion of codes to bfloat16 by one custom call, for the programs of
    other ops on CPUs.

    bfloat16 has half of f32's bytes, and newer processors multiply it natively.
    """
    dtype = np.dtype(jnp.bfloat16)
    if _support.why_disabled("dequantize"):
        return lambda data: data.astype(dtype)
    unit = jax.lax.full((1,), 1.0, np.float32)
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
        f32[2], the numbers of saturated and of flushed elements, exact up to 2**24. A
        device counts at most 2**32 elements.

    Raises:
        TypeError: x, scale or dtype has another dtype; or the op is differentiated.
        ValueError: scale has another shape.
    """
    op = "count_saturated_and_flushed"
    x = _checks.high_precision(op, "x", x)
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    return _Count(dtype)(x, scale)[0]


def _row_sums(words):
    """Sum over the last dimension, cut into rows that `_MAX_ROW` allows."""
    size = words.shape[-1]
    pieces = -(-size // _MAX_ROW)
    if pieces > 1:
        words = _shapes.pad(words, -size % pieces).reshape(
            *words.shape[:-1], pieces, -1
        )
    return jnp.sum(words, axis=-1, dtype=jnp.uint32)


class _Count(Op):
    name = "count_saturated_and_flushed"
    dtype: np.dtype  # of the codes

    def names(self, x, scale):
        return [dims("x", x), ONE], [_COUNTS]

    def sizes(self, *shapes):
        return {_COUNTS[0]: 2}

    def reference(self, x, scale):
        saturated, flushed = is_saturated_or_flushed(
            x, _shapes.stretch(scale, x), self.dtype
        )
        # Two sums in one: a sum for each count would be two reductions, for which XLA
        # writes the product of every element to memory first. A row adds up both counts
        # as the halves of one word.
        words = saturated.astype(jnp.uint32) | (flushed.astype(jnp.uint32) << 16)
        if x.ndim == self.vmap_dims:
            words = words[..., None]
        rows = _shapes.merge(_row_sums(words), *[1] * self.vmap_dims)
        saturated = jnp.sum(rows & 0xFFFF, axis=-1, dtype=jnp.uint32)
        flushed = jnp.sum(rows >> 16, axis=-1, dtype=jnp.uint32)
        return (jnp.stack([saturated, flushed], axis=-1).astype(jnp.float32),)

    def cpu(self, x, scale):
        # This is not `reference` itself, though it computes the same: XLA would cut the
        # reference on a mesh by itself, and add up the counts of all devices in 32
        # bits, which hold the counts of one.
        return self.reference(x, scale)
