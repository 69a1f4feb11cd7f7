"""encode_moment and decode_moment: moments of an optimizer in FP8, with an amax and an
exponent for each block.

A moment is `(data, amax, exponent)`: float8_e4m3fn codes in its shape; and for each
block of 128 elements along an axis the largest finite magnitude a, f32, and the binary
logarithm of k, int8. The codes are of `sign(x) 448 u**k`, where `u = |x| / a`. This
range expansion (COAT, arXiv:2410.19313) spends the format's range on the numbers of the
block: a block of half the span in octaves can have twice the k, which halves its
errors. Each block has the largest k of 2, 1 and 1/2 that its smallest element allows.
These powers are products and square roots, which all platforms round alike.

An element that is not finite has the code of NaN and does not count in the amax, so
that it spoils no other element. A subnormal element counts as zero, because XLA's CPU
threads compute with subnormals as if they were zero.
"""

import jax.numpy as jnp
from jax import lax

from ..numerics._moment_codec import (
    BLOCK,
    changes_and_span,
    decoded,
    each,
    each_amax,
    encoded,
    join,
    split,
)
from . import _ffi, _shapes
from ._partition import blocks_of
from ._primitive import Op, dims

# The number of elements that share an amax and an exponent.
MOMENT_BLOCK = BLOCK


def decode_moment(data, amax, exponent, *, axis):
    """Compute the f32 elements of a moment: `sign(data) amax (|data| / 448)**(1 / k)`.

    Args:
        data: float8_e4m3fn `[..., n, ...]`.
        amax, exponent: f32 and int8 `[..., ceil(n / 128), ...]`.
        axis: the axis that blocks cut.

    Returns:
        f32, in the shape of `data`.
    """
    return _DecodeMoment(axis - data.ndim)(data, amax, exponent)[0]


def encode_moment(data, amax, exponent, after, keys, *, squared, axis):
    """Quantize `after` where a block differs from what the moment decodes to; keep the
    bits of other blocks.

    Args:
        data, amax, exponent, axis: the moment, as in `decode_moment`.
        after: f32 in the shape of `data`.
        keys: random u32 in the shape of `amax`: rounds stochastically by the high bits
            of `keys + i mix(keys) + i**2 mix(mix(keys))`, where i is the number of an
            element in its block. None rounds to nearest.
        squared: whether the elements are squares. Stochastic rounding keeps the mean of
            their fourth roots, of other elements that of the elements. Squares round to
            zero only where they are zero, and k depends on other spans.

    Returns:
        `(data, amax, exponent)`, of the shapes and dtypes of the arguments.
    """
    keys = () if keys is None else (keys,)
    op = _EncodeMoment(axis - data.ndim, squared)
    return tuple(op(data, amax, exponent, after, *keys))


# --------------------------------------------------------------------- the custom calls


def to_rows(x, axis):
    """Return a matrix whose rows the blocks cut."""
    return _shapes.merge(jnp.moveaxis(x, axis, -1), x.ndim - 1)


def from_rows(rows, axis, shape):
    """Undo `to_rows` of an array of `shape`."""
    sizes = list(shape)
    sizes.append(sizes.pop(axis))
    return jnp.moveaxis(rows.reshape(sizes), -1, axis)


# ----------------------------------------------------------------------- the primitives


def moment_names(rank, axis, leaf=""):
    """Return the names of the dimensions of elements, and those of blocks."""
    names = dims(f"{leaf}x", rank)
    before, after = names[: rank + axis], names[rank + axis + 1 :]
    cut = (f"{leaf}col0",)
    blocks = (blocks_of(cut, MOMENT_BLOCK),)
    return (before, cut, after), (before, blocks, after)


class _DecodeMoment(Op):
    name = "decode_moment"
    axis: int  # that blocks cut, counted from the end

    def names(self, *ranks):
        elements, blocks = moment_names(ranks[0], self.axis)
        return [elements, blocks, blocks], [elements]

    def reference(self, data, amax, exponent):
        axis = self.axis
        codes = split(data.view(jnp.uint8), axis)
        values = decoded(codes, each_amax(amax, axis), each(exponent, axis))
        return (join(values, axis, data.shape),)

    def cpu(self, data, amax, exponent):
        rows = [to_rows(x, self.axis) for x in (data, amax, exponent)]
        (out,) = _ffi.call("decode_moment", [(rows[0].shape, jnp.float32)], *rows)
        return (from_rows(out, self.axis, data.shape),)

    # XLA fuses it into the update, so that decoded moments are not read from memory
    cuda = reference


class _EncodeMoment(Op):
    name = "encode_moment"
    axis: int  # that blocks cut, counted from the end
    squared: bool

    def names(self, *ranks):
        elements, blocks = moment_names(ranks[0], self.axis)
        moment = [elements, blocks, blocks]
        return [*moment, elements, blocks][: len(ranks)], moment

    def dtypes(self, data, amax, exponent, *operands):
        return [data.dtype, amax.dtype, exponent.dtype]

    def reference(self, data, amax, exponent, after, *keys):
        axis = self.axis
        # 1. Read the moment for the numbers of its blocks. The barriers keep XLA from
        #    storing what its decoding, this step and the next have in common, which
        #    would be more bytes than the moment.
        codes, after = lax.optimization_barrier((data.view(jnp.uint8), after))
        keep, top, bottom = changes_and_span(
            split(codes, axis), amax, exponent, split(after, axis), axis
        )
        old, after, keep, top, bottom = lax.optimization_barrier(
            (codes, after, keep, top, bottom)
        )

        # 2. Encode all blocks, and keep the bits of those that are the same. Select
        #    bytes: XLA's CPU compiler may move FP8 through float16.
        codes, power = encoded(
            split(after, axis),
            top,
            bottom,
            keys[0] if keys else None,
            self.squared,
            axis,
        )
        codes = jnp.where(each(keep, axis), split(old, axis), codes.astype(jnp.uint8))
        data = join(codes, axis, data.shape).view(data.dtype)
        return data, jnp.where(keep, amax, top), jnp.where(keep, exponent, power)

    def cpu(self, *operands):
        rows = [to_rows(x, self.axis) for x in operands]
        rows += [lax.full((0,), 0, jnp.uint32)] * (5 - len(rows))  # no keys
        results = [(x.shape, x.dtype) for x in rows[:3]]
        aliases = {0: 0, 1: 1, 2: 2}
        new = _ffi.call(
            "encode_moment", results, *rows, aliases=aliases, squared=self.squared
        )
        return [
            from_rows(x, self.axis, old.shape)
            for x, old in zip(new, operands[:3], strict=True)
        ]
