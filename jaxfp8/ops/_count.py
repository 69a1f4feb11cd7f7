"""count_saturated_and_flushed: how many elements FP8 cannot hold at a scale."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES, is_saturated_or_flushed
from . import _checks, _shapes
from ._primitive import ONE, Op, dims

_COUNTS = dims("whole_count", 1)  # a dimension that no mesh cuts
_MAX_ROW = 2**16 - 1  # elements that half of a 32-bit word can count


def count_saturated_and_flushed(x: ArrayLike, scale: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Count the elements of `x * scale` that saturate in `dtype`, and those that become zero.

    With `y = x.astype(f32) * scale` an element is saturated where `abs(y) > FP8_MAX`: an Inf is saturated, a NaN is
    not. An element is flushed where x is not zero and its code, as of `quantize`, is zero.

    XLA computes the counts on every platform, in one read of `x`.

    Args:
        x: bfloat16, float16 or float32, any shape.
        scale: f32[] or f32[1], the factor of x.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        f32[2], the numbers of saturated and of flushed elements, exact up to 2**24. A device counts at most 2**32
        elements.

    Raises:
        TypeError: x, scale or dtype has another dtype; or the op is differentiated.
        ValueError: scale has another shape.
    """
    op = "count_saturated_and_flushed"
    x = _checks.high_precision(op, "x", x)
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    return _count(x, scale, dtype=dtype)[0]


def _row_sums(words):
    """Sum over the last dimension, cut into rows that `_MAX_ROW` allows."""
    size = words.shape[-1]
    pieces = -(-size // _MAX_ROW)
    if pieces > 1:
        words = _shapes.pad(words, -size % pieces).reshape(*words.shape[:-1], pieces, -1)
    return jnp.sum(words, axis=-1, dtype=jnp.uint32)


class _Count(Op):
    name = "count_saturated_and_flushed"

    def names(self, x, scale, dtype):
        return [dims("x", x), ONE], [_COUNTS]

    def sizes(self, *shapes, **static):
        return {_COUNTS[0]: 2}

    def reference(self, x, scale, vmap_dims, dtype):
        saturated, flushed = is_saturated_or_flushed(x, _shapes.stretch(scale, x), dtype)
        # Two sums in one: a sum for each count would be two reductions, for which XLA writes the product of every
        # element to memory first. A row adds up both counts as the halves of one word.
        words = saturated.astype(jnp.uint32) | (flushed.astype(jnp.uint32) << 16)
        rows = _shapes.merge(_row_sums(words if x.ndim > vmap_dims else words[..., None]), *[1] * vmap_dims)
        counts = [jnp.sum(half, axis=-1, dtype=jnp.uint32) for half in (rows & 0xFFFF, rows >> 16)]
        return (jnp.stack(counts, axis=-1).astype(jnp.float32),)

    def cpu(self, *operands, **static):
        # This is not `reference` itself, though it computes the same: XLA would cut the reference on a mesh by itself,
        # and add up the counts of all devices in 32 bits, which hold the counts of one.
        return self.reference(*operands, **static)


_count = _Count()
