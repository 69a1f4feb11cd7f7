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

from ..numerics import _moment_codec as codec
from . import _ffi
from ._partition import blocks_of
from ._primitive import Op, dims

# The number of elements that share an amax and an exponent.
MOMENT_BLOCK = codec.BLOCK


def decode_moment(data, amax, exponent, *, axis):
    """Compute the f32 elements of a moment: `sign(data) amax (|data| / 448)**(1 / k)`.

    Args:
        data: float8_e4m3fn `[..., n, ...]`.
        amax, exponent: f32 and int8 `[..., ceil(n / 128), ...]`.
        axis: the axis that blocks cut.

    Returns:
        f32, in the shape of `data`.
    """
    moment = [jnp.moveaxis(x, axis, -1) for x in (data, amax, exponent)]
    return jnp.moveaxis(_DecodeMoment()(*moment)[0], -1, axis)


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
    operands = [data, amax, exponent, after]
    if keys is not None:
        operands.append(keys)
    moved = [jnp.moveaxis(x, axis, -1) for x in operands]
    return tuple(jnp.moveaxis(x, -1, axis) for x in _EncodeMoment(squared)(*moved))


# ------------------------------------------------- the primitives, along the last axis


def moment_names(rank, leaf=""):
    """Return the names of the dimensions of elements, and those of blocks."""
    rows, cut = dims(f"{leaf}row", rank - 1), (f"{leaf}col0",)
    return (rows, cut), (rows, (blocks_of(cut, MOMENT_BLOCK),))


class _DecodeMoment(Op):
    name = "decode_moment"

    def names(self, *ranks):
        elements, blocks = moment_names(ranks[0])
        return [elements, blocks, blocks], [elements]

    def reference(self, data, amax, exponent):
        codes = codec.split(data.view(jnp.uint8))
        return (codec.join(codec.decoded(codes, amax, exponent), data.shape),)

    # XLA fuses it into the update, so that decoded moments are not read from memory
    cuda = reference


class _EncodeMoment(Op):
    name = "encode_moment"
    squared: bool

    def names(self, *ranks):
        elements, blocks = moment_names(ranks[0])
        moment = [elements, blocks, blocks]
        return [*moment, elements, blocks][: len(ranks)], moment

    def dtypes(self, data, amax, exponent, *operands):
        return [data.dtype, amax.dtype, exponent.dtype]

    def reference(self, data, amax, exponent, after, *keys):
        # The barrier keeps XLA from storing what both of its sides have in common.
        codes, after = codec.split(data.view(jnp.uint8)), codec.split(after)
        keep = codec.decodes_to(after, codes, amax, exponent)
        old, after, keep, top, bottom = lax.optimization_barrier(
            (codes, after, keep, *codec.span(after))
        )
        codes, power = codec.encoded(after, top, bottom, *keys, squared=self.squared)
        # Keep the bits of blocks that are the same. Select bytes: XLA's CPU compiler
        # may move FP8 through float16.
        codes = jnp.where(codec.each(keep), old, codes.astype(jnp.uint8))
        data = codec.join(codes, data.shape).view(data.dtype)
        return data, jnp.where(keep, amax, top), jnp.where(keep, exponent, power)

    def cpu(self, *operands):
        rows, results = self.in_groups(operands, self.results(*operands))
        rows += [lax.full((0,), 0, jnp.uint32)] * (5 - len(rows))  # no keys
        aliases = {0: 0, 1: 1, 2: 2}
        new = _ffi.call(
            "encode_moment", results, *rows, aliases=aliases, squared=self.squared
        )
        return [x.reshape(old.shape) for x, old in zip(new, operands, strict=False)]
