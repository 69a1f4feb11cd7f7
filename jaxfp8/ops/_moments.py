"""decode_moment and encode_moment: the moments of an optimizer in FP8, with an amax and an exponent for each block.

A moment is `(data, amax, exponent)`: float8_e4m3fn codes in its shape; and for each block of 128 elements along an axis
the largest finite magnitude a, f32, and the binary logarithm of k, int8. The codes are of `sign(x) 448 u**k`, where
`u = |x| / a`. This range expansion (COAT, arXiv:2410.19313) spends the format's range on the numbers of the block: a
block of half the span in octaves can have twice the k, which halves its errors. Each block has the largest k of 2, 1
and 1/2 that its smallest element allows. These powers are products and square roots, which all platforms round alike.

An element that is not finite has the code of NaN and does not count in the amax, so that it spoils no other element. A
subnormal element counts as zero, because XLA's CPU threads compute with subnormals as if they were zero.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import E4M3, _scaling, rounded
from . import _blocks, _ffi
from ._primitive import Op, dims

BLOCK = 128
_MAX = np.float32(E4M3.max)
_MAX_INV = np.float32(1 / E4M3.max)
_NAN_CODE = 0x7F
_NAN_BITS = np.int32(0x7FC00000)
_MIN_NORMAL_BITS = np.uint32(0x00800000)
_INF_BITS = np.uint32(0x7F800000)
_DROPPED_BITS = 20  # of the significand of an f32, in e4m3
_FRACTION = (1 << _DROPPED_BITS) - 1
_BIAS = 120  # of the exponents of f32, less that of e4m3
_SMALLEST_NORMAL = np.float32(2.0**-6)
# The smallest u that k = 2 and k = 1 allow. Of both signs, 448 u**k is above half of the smallest code: rounding to
# nearest flushes nothing, and stochastic rounding makes an element at most 2**(1/k) times what it was. Of squares,
# whose roots divide, it is a normal number, with an error of 2**-4 at most.
_SIGNED_SPANS = (np.float32(2.0**-9.4), np.float32(2.0**-18.8))
_SQUARED_SPANS = (np.float32(2.0**-7.4), np.float32(2.0**-14.8))


def decode_moment(data: jax.Array, amax: jax.Array, exponent: jax.Array, *, axis: int) -> jax.Array:
    """Compute the f32 elements of a moment: `sign(data) amax (|data| / 448)**(1 / k)`.

    Args:
        data: float8_e4m3fn `[..., n, ...]`.
        amax, exponent: f32 and int8 `[..., ceil(n / 128), ...]`.
        axis: the axis that blocks cut.

    Returns:
        f32, in the shape of `data`.
    """
    return _decode(data, amax, exponent, spec=_Spec(axis - data.ndim))[0]


def encode_moment(
    data: jax.Array,
    amax: jax.Array,
    exponent: jax.Array,
    after: jax.Array,
    keys: jax.Array | None,
    *,
    squared: bool,
    axis: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `after` where a block differs from what the moment decodes to; keep the bits of other blocks.

    Args:
        data, amax, exponent, axis: the moment, as in `decode_moment`.
        after: f32 in the shape of `data`.
        keys: u32 in the shape of `amax`: rounds stochastically by the bits `mix(mix(keys ^ i))`, where i is the number
            of an element in its block. None rounds to nearest.
        squared: whether the elements are squares. Stochastic rounding keeps the mean of their fourth roots, of other
            elements that of the elements. Squares round to zero only where they are zero, and k depends on other spans.

    Returns:
        `(data, amax, exponent)`, of the shapes and dtypes of the arguments.
    """
    keys = () if keys is None else (keys,)
    return tuple(_encode(data, amax, exponent, after, *keys, spec=_Spec(axis - data.ndim, squared)))


def mix(x: jax.Array) -> jax.Array:
    """Mix the bits of a u32: a bijection in which each bit of x changes half of the bits of the result.

    The finalizer of MurmurHash3 (Appleby, public domain), from a number that is not its fixed point 0.
    """
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# ------------------------------------------------------------------------------------------------ the reference


def _decoded(codes, amax, exponent):
    """Return the numbers that codes stand for, with NaN of one bit pattern, and zeros for those that are subnormal.

    CPUs flush a product that is below 2**-126 once it is rounded to 24 bits. GPUs round it as a subnormal number, so
    the product times 2**24, which is none, tells what to flush.

    Every operation has an operand that differs between the elements of a block: XLA computes what has none in launches
    of its own. So exponents are compared with the sign of a magnitude, which is 0. `codes` are u8, because GPUs do not
    keep the sign of a NaN that they convert.
    """
    magnitudes = codes & np.uint8(0x7F)
    exponent = lax.broadcast_in_dim(exponent, codes.shape, range(codes.ndim))
    zero = lax.bitcast_convert_type(magnitudes >> 7, jnp.int8)
    fraction = _decoded_fraction(_numbers(magnitudes), exponent, zero)
    times_2_24 = _scaling.from_bits(_scaling.to_bits(fraction) + (24 << 23)) * amax
    bits = _scaling.to_bits(jnp.where(times_2_24 < np.float32(2.0**-102), 0, fraction * amax))
    bits = jnp.where(magnitudes == _NAN_CODE, _NAN_BITS, bits)
    return _scaling.from_bits(bits | (codes & np.uint8(0x80)).astype(jnp.int32) << 24)


def _numbers(codes):
    return lax.bitcast_convert_type(codes, E4M3.dtype).astype(jnp.float32)


def _decoded_fraction(codes, exponent, zero=0):
    """Return the fraction u of the amax that codes without a sign stand for."""
    power = codes * _MAX_INV
    return jnp.where(exponent > zero, _scaling.round_sqrt(power), jnp.where(exponent < zero, power * power, power))


def _block_numbers(codes, amax, exponent, blocks, axis):
    """Return of each block, by one reduction: whether it decodes to its bits, its largest and its smallest number."""
    changed = _scaling.to_bits(_decoded(codes, amax, exponent)) ^ _scaling.to_bits(blocks)
    bits = (_scaling.to_bits(blocks) & 0x7FFFFFFF).astype(jnp.uint32)
    # Unsigned bits of magnitudes sort like the magnitudes. Less the bits of Inf, finite numbers wrap around and are
    # larger than Inf and NaN, which the max so skips; less the bits of the smallest normal number, zeros and subnormal
    # numbers wrap around, which the min so skips.
    changed, top, bottom = lax.reduce(
        (changed, bits - _INF_BITS, bits - _MIN_NORMAL_BITS),
        (np.int32(0), np.uint32(2**32 - 0x7F800000), _INF_BITS - _MIN_NORMAL_BITS),
        lambda x, y: (x[0] | y[0], jnp.maximum(x[1], y[1]), jnp.minimum(x[2], y[2])),
        (blocks.ndim + axis,),
    )
    top, bottom = (lax.bitcast_convert_type(x, jnp.float32) for x in (top + _INF_BITS, bottom + _MIN_NORMAL_BITS))
    return tuple(jnp.expand_dims(x, axis) for x in (changed == 0, _magnitude(top), bottom))


def _magnitude(blocks):
    """Return |x|, with 0 for subnormal numbers.

    The comparison is one of integers: XLA's CPU compiler turns float comparisons with 0 and Inf into tests of bits,
    which do not flush subnormal numbers.
    """
    bits = _scaling.to_bits(blocks) & 0x7FFFFFFF
    return lax.bitcast_convert_type(jnp.where(bits < _MIN_NORMAL_BITS.astype(np.int32), 0, bits), jnp.float32)


def _split(x, axis):
    """Split an axis, counted from the end, into blocks and their elements, with zeros to fill the last block up."""
    size, place = x.shape[axis], x.ndim + axis
    width = min(max(size, 1), BLOCK)
    count = -(-size // width)
    if missing := count * width - size:
        x = jnp.pad(x, [(0, missing if i == place else 0) for i in range(x.ndim)])
    return x.reshape(*x.shape[:place], count, width, *x.shape[place + 1 :])


def _join(blocks, axis, shape):
    """Undo `_split` of an array of `shape`."""
    place = len(shape) + axis
    size = blocks.shape[place] * blocks.shape[place + 1]
    return lax.slice_in_dim(blocks.reshape(*shape[:place], size, *shape[place + 1 :]), 0, shape[place], axis=place)


def _random_bits(keys, blocks, axis):
    elements = [1] * blocks.ndim
    elements[axis] = blocks.shape[axis]
    return mix(mix(jnp.expand_dims(keys, axis) ^ lax.broadcasted_iota(jnp.uint32, elements, blocks.ndim + axis)))


def _fraction(magnitude, amax):
    """Divide by the amax: u in [0, 1], with an error of at most 1.5 ulp."""
    # The inverse of an amax above 2**126 would be subnormal.
    unit = jnp.where(amax > 1, np.float32(2.0**-32), np.float32(1))
    inverse = _scaling.round_quotient(jnp.ones_like(amax), jnp.maximum(amax * unit, np.float32(2.0**-126)))
    return jnp.minimum(magnitude * unit * inverse, 1)


def _fixed_point(y):
    """Return the code of y in [0, 448] in e4m3, as an integer with 20 bits after the point."""
    multiple = (y * np.float32(512 << _DROPPED_BITS)).astype(jnp.int32)
    return jnp.where(y < _SMALLEST_NORMAL, multiple, _scaling.to_bits(y) - (_BIAS << 23))


def _round_signed(u, y, exponent, random_bits):
    """Return the code, as an integer, of a neighbour of y = 448 u**k in e4m3, so that u keeps its mean.

    With the fractions that the neighbours decode to, the probability of the code above is

        (u - below) / (above - below)

    No product is added to anything here: compilers would round the two at once on some platforms.
    """
    code = _fixed_point(y) >> _DROPPED_BITS
    # Above the largest code is NaN, which is never taken.
    below, above = (_decoded_fraction(_numbers(c.astype(jnp.uint8)), exponent) for c in (code, code + 1))
    draw = (random_bits >> 8).astype(jnp.int32).astype(u.dtype) * np.float32(2.0**-24)
    return code + (draw * (above - below) < u - below).astype(jnp.int32)


def _round_square(y, exponent, random_bits):
    """Return the code, as an integer, of a neighbour of y in [0, 448] in e4m3, so that x**(1/4) keeps its mean.

    With f of the gap below y, the probability of the code above is f + f (1 - f) c (15 - m) / 2**15, where m are the
    three bits of the code's significand and c is 68, 102 or 119 for k = 1/2, 1 or 2. The gap is 1 / (8 + m) of y, for
    which (15 - m) / 120 stands. To second order in it x**(1/4), a power a = 1 / (4 k) of y, keeps its mean with

        f + f (1 - f) (1 - a) / (2 (8 + m))

    The moving average adds up what rounding changes. Where x**p keeps its mean, an error of relative variance s in the
    root of x makes the mean of its inverse, and so the step of an optimizer, larger by (2 p - 1/2) s: by 0 for p = 1/4.
    """
    # 1. Write y as a code with 20 bits after the point.
    fixed_point = _fixed_point(y)
    code, fraction = fixed_point >> _DROPPED_BITS, fixed_point & _FRACTION

    # 2. Find the probability of the code above, in 20 bits: the product of fractions has 40.
    product = (fraction * ((_FRACTION + 1 - fraction) >> 9)) >> 11
    c = jnp.where(exponent > 0, 119, jnp.where(exponent < 0, 68, 102))
    probability = fraction + ((product * (15 - (code & 7)) * c) >> 15)

    # 3. Round up with that probability.
    return code + ((probability + (random_bits & _FRACTION).astype(jnp.int32)) >> _DROPPED_BITS)


# ------------------------------------------------------------------------------------------------ the custom calls


def _to_rows(x, axis):
    """Return a matrix whose rows the blocks cut."""
    x = jnp.moveaxis(x, axis, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _from_rows(rows, axis, shape):
    """Undo `_to_rows` of an array of `shape`."""
    sizes = [size for i, size in enumerate(shape) if i != len(shape) + axis]
    return jnp.moveaxis(rows.reshape(*sizes, shape[axis]), -1, axis)


# ------------------------------------------------------------------------------------------------ the primitives


def _names(data, axis):
    """Return the names of the dimensions of elements, and those of blocks."""
    before, after = dims("x", data)[: data + axis], dims("x", data)[data + axis + 1 :]
    return (*before, "col0", *after), (*before, "blocks", *after)


class _Spec(NamedTuple):
    """The static part: the axis that blocks cut, counted from the end, and whether the elements are squares."""

    axis: int
    squared: bool = False


class _Moment(Op):
    """An op of moments."""

    def align(self, axes, sizes, mesh_shape, spec):
        """Cut amaxes and exponents where the codes are cut, and these between blocks."""
        # More operands count blocks than elements: a mesh axis that cuts both has been given to the blocks.
        if "blocks" in axes and "col0" not in axes:
            axes = axes | {"col0": axes["blocks"]}
        return _blocks.aligned(axes, sizes, mesh_shape, {"col": {"blocks": BLOCK}})


class _DecodeMoment(_Moment):
    name = "decode_moment"

    def names(self, *ranks, spec):
        elements, blocks = _names(ranks[0], spec.axis)
        return [elements, blocks, blocks], [elements]

    def reference(self, data, amax, exponent, vmap_dims, spec):
        axis = spec.axis
        codes = _split(lax.bitcast_convert_type(data, jnp.uint8), axis)
        values = _decoded(codes, *(jnp.expand_dims(x, axis) for x in (amax, exponent)))
        return (_join(values, axis, data.shape),)

    def cpu(self, data, amax, exponent, vmap_dims, spec):
        rows = [_to_rows(x, spec.axis) for x in (data, amax, exponent)]
        (out,) = _ffi.call("decode_moment", [(rows[0].shape, jnp.float32)], *rows)
        return (_from_rows(out, spec.axis, data.shape),)

    cuda = reference  # XLA fuses it into the update, so that decoded moments are not read from memory


class _EncodeMoment(_Moment):
    name = "encode_moment"

    def names(self, *ranks, spec):
        elements, blocks = _names(ranks[0], spec.axis)
        return [elements, blocks, blocks, elements, blocks][: len(ranks)], [elements, blocks, blocks]

    def dtypes(self, data, amax, exponent, *operands, spec):
        return [data.dtype, amax.dtype, exponent.dtype]

    def reference(self, data, amax, exponent, after, *keys, vmap_dims, spec):
        axis, squared = spec
        # 1. Read the moment for the numbers of its blocks. The barriers keep XLA from storing what its decoding, this
        # step and the next have in common, which would be more bytes than the moment.
        codes, after = lax.optimization_barrier((lax.bitcast_convert_type(data, jnp.uint8), after))
        old_amax, old_exponent = jnp.expand_dims(amax, axis), jnp.expand_dims(exponent, axis)
        keep, top, bottom = _block_numbers(_split(codes, axis), old_amax, old_exponent, _split(after, axis), axis)
        old, after, keep, top, bottom = lax.optimization_barrier((codes, after, keep, top, bottom))

        # 2. Find k of each block, divide by the amax and take the power.
        of_2, of_1 = _SQUARED_SPANS if squared else _SIGNED_SPANS
        power = jnp.where(bottom >= top * of_2, 1, jnp.where(bottom >= top * of_1, 0, -1)).astype(jnp.int8)
        blocks = _split(after, axis)
        magnitude = _magnitude(blocks)
        u = _fraction(magnitude, top)
        y = _MAX * jnp.where(power > 0, u * u, jnp.where(power < 0, _scaling.round_sqrt(u), u))

        # 3. Round. Squares that are not zero have at least the smallest code.
        if not keys:
            codes = rounded(y, E4M3.dtype)
        elif squared:
            codes = _round_square(y, power, _random_bits(keys[0], blocks, axis))
        else:
            codes = _round_signed(u, y, power, _random_bits(keys[0], blocks, axis))
        if squared:
            codes = jnp.maximum(codes, (magnitude > 0).astype(jnp.int32))
        codes = jnp.where(magnitude < np.inf, codes, _NAN_CODE) | jnp.where(jnp.signbit(blocks), 0x80, 0)

        # 4. Keep the bits of blocks that are the same. Select bytes: XLA's CPU compiler may move FP8 through float16.
        codes = jnp.where(keep, _split(old, axis), codes.astype(jnp.uint8))
        data = lax.bitcast_convert_type(_join(codes, axis, data.shape), data.dtype)
        new = (jnp.where(keep, old_amax, top), jnp.where(keep, old_exponent, power))
        return data, *(jnp.squeeze(x, axis) for x in new)

    def cpu(self, *operands, vmap_dims, spec):
        rows = [_to_rows(x, spec.axis) for x in operands]
        rows += [lax.full((0,), 0, jnp.uint32)] * (5 - len(rows))  # no keys
        results = [(x.shape, x.dtype) for x in rows[:3]]
        new = _ffi.call("encode_moment", results, *rows, aliases={0: 0, 1: 1, 2: 2}, squared=spec.squared)
        return [_from_rows(x, spec.axis, old.shape) for x, old in zip(new, operands[:3], strict=True)]


_decode = _DecodeMoment()
_encode = _EncodeMoment()
