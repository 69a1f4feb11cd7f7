"""The arithmetic of moments in FP8, in which blocks of elements share an amax and an
exponent; and a step of Adam on them, for one leaf of the parameters.

`jaxfp8/ops/_encode_moment.py` says what a moment is. Here an axis of elements is two
axes: blocks, and the elements of one.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _scaling, _tpu
from ._codec import E4M3, rounded
from ._tpu import BLOCK

_MAX = np.float32(E4M3.max)
_MAX_INV = np.float32(1 / E4M3.max)
NAN_CODE = 0x7F
INF_CODE = 0xFF  # of squares: a NaN with a sign
_NAN_BITS = np.int32(0x7FC00000)
_SMALLEST_F32 = np.float32(2.0**-126)
# The smallest terms of a step of Adam, of which no difference or sum is subnormal.
_LEAST = np.float32(2.0**-102)
_LEAST_SQUARE = np.float32(2.0**-125)
_DROPPED_BITS = 20  # of the significand of an f32, in e4m3
_FRACTION = (1 << _DROPPED_BITS) - 1
_BIAS = 120  # of the exponents of f32, less that of e4m3
_SMALLEST_NORMAL = np.float32(2.0**-6)
# The smallest u that k = 2 and k = 1 allow. Of both signs, 448 u**k is above half of
# the smallest code: rounding to nearest flushes nothing, and stochastic rounding makes
# an element at most 2**(1/k) times what it was. Of squares, whose roots divide, it is a
# normal number, with an error of 2**-4 at most.
_SIGNED_SPANS = (np.float32(2.0**-9.4), np.float32(2.0**-18.8))
_SQUARED_SPANS = (np.float32(2.0**-7.4), np.float32(2.0**-14.8))


def mix(x):
    """Mix the bits of a u32: a bijection in which each bit of x changes half of the
    bits of the result.

    The finalizer of MurmurHash3 (Appleby, public domain), from a number that is not its
    fixed point 0.
    """
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def decoded(codes, amax, exponent):
    """Return the numbers that codes stand for, with NaN of one bit pattern, and zeros
    for those that are subnormal.

    CPUs flush a product that is below 2**-126 once it is rounded to 24 bits. GPUs round
    it as a subnormal number, so the product times 2**24, which is none, tells what to
    flush. TPUs have no subnormal numbers.

    Every operation has an operand that differs between the elements of a block: XLA
    computes what has none in launches of its own. So exponents are compared with the
    sign of a magnitude, which is 0. `codes` are u8, because GPUs do not keep the sign
    of a NaN that they convert.
    """
    amax, exponent = each_amax(amax), each(exponent)
    magnitudes = codes & np.uint8(0x7F)
    sign = (codes & np.uint8(0x80)).astype(jnp.int32) << 24
    if _tpu.is_target():
        product = _decoded_fraction(_numbers(magnitudes), exponent) * amax
    else:
        exponent = lax.broadcast_in_dim(exponent, codes.shape, range(codes.ndim))
        zero = lax.bitcast_convert_type(magnitudes >> 7, jnp.int8)
        fraction = _decoded_fraction(_numbers(magnitudes), exponent, zero)
        times_2_24 = _scaling.from_bits(_scaling.to_bits(fraction) + (24 << 23)) * amax
        product = jnp.where(times_2_24 < np.float32(2.0**-102), 0, fraction * amax)
    bits = _scaling.to_bits(product)
    bits = jnp.where(magnitudes == NAN_CODE, _NAN_BITS, bits)
    return _scaling.from_bits(bits | sign)


def _numbers(codes):
    return codes.view(E4M3.dtype).astype(jnp.float32)


def _decoded_fraction(codes, exponent, zero=0):
    """Return the fraction u of the amax that codes without a sign stand for.

    XLA would square the constant of `power * power` by itself where there is one code.
    """
    power = codes * _MAX_INV
    factor = jnp.where(exponent < zero, power, np.float32(1))
    return jnp.where(exponent > zero, _scaling.round_sqrt(power), power * factor)


def decodes_to(blocks, codes, amax, exponent):
    """Return of each block whether its codes decode to its bits."""
    before = decoded(codes, amax, exponent)
    changed = _scaling.to_bits(before) != _scaling.to_bits(blocks)
    return _reduce(jnp.max, changed.astype(jnp.float32)) == 0


def span(blocks):
    """Return the largest and the smallest normal magnitude of each block; 0 and
    infinity where it has none.
    """
    magnitudes = jnp.abs(blocks)
    is_normal = (magnitudes >= _SMALLEST_F32) & (magnitudes < np.inf)
    top = _reduce(jnp.max, jnp.where(is_normal, magnitudes, 0))
    return top, _reduce(jnp.min, jnp.where(is_normal, magnitudes, np.inf))


def _reduce(function, blocks):
    if _tpu.is_target():
        return _tpu.reduce_blocks(function, blocks)
    return function(blocks, axis=-1)


def encoded(blocks, top, bottom, keys=None, *, squared):
    """Return the codes of all elements, as int32, and the exponents of their blocks.

    Args:
        blocks: f32, with the elements of a block along the last axis.
        top, bottom: the `span` of the blocks.
        keys: u32, one for each block, for random bits; None rounds to nearest.
        squared: whether the elements are squares.
    """
    # 1. Find k of each block, divide by the amax and take the power.
    of_2, of_1 = _SQUARED_SPANS if squared else _SIGNED_SPANS
    exponent = jnp.where(
        bottom >= top * of_2, 1, jnp.where(bottom >= top * of_1, 0, -1)
    ).astype(jnp.int8)
    power, random_bits = _exponent_and_random_bits(exponent, keys, blocks)
    magnitude = _above(jnp.abs(blocks), _SMALLEST_F32)
    u = _fraction(magnitude, top)
    y = _MAX * jnp.where(
        power > 0, u * u, jnp.where(power < 0, _scaling.round_sqrt(u), u)
    )

    # 2. Round. Squares that are not zero have at least the smallest code.
    if keys is None:
        codes = rounded(y, E4M3.dtype)
    elif squared:
        codes = _round_square(y, power, random_bits)
    else:
        codes = _round_signed(u, y, power, random_bits)
    if squared:
        codes = jnp.maximum(codes, (magnitude > 0).astype(jnp.int32))
    return jnp.where(magnitude < np.inf, codes, NAN_CODE) | jnp.where(
        jnp.signbit(blocks), 0x80, 0
    ), exponent


def _above(x, least=_LEAST):
    """Return 0 in place of what is below `least`."""
    return jnp.where(jnp.abs(x) < least, np.float32(0), x)


def split(x):
    """Split the last axis into blocks and their elements, with zeros to fill the last
    block up.

    In programs for TPUs the axis stays one, of whole blocks.
    """
    *leading, size = x.shape
    width = BLOCK if _tpu.is_target() else min(max(size, 1), BLOCK)
    count = -(-size // width)
    if missing := count * width - size:
        x = jnp.pad(x, [(0, 0)] * len(leading) + [(0, missing)])
    return x if _tpu.is_target() else x.reshape(*leading, count, width)


def join(blocks, shape):
    """Undo `split` of an array of `shape`."""
    if not _tpu.is_target():
        blocks = lax.collapse(blocks, len(shape) - 1)
    return lax.slice_in_dim(blocks, 0, shape[-1], axis=-1)


def each(numbers):
    """Give each element the number of its block: an array that broadcasts to the blocks
    of `split`.
    """
    return _tpu.each(numbers) if _tpu.is_target() else numbers[..., None]


def each_amax(amax):
    """Give each element the amax of its block."""
    if not _tpu.is_target():
        return each(amax)
    # The last bits of a small amax are below 2**-126. Its sign tells that it is larger.
    is_small = amax < np.float32(2.0**-64)
    amax = each(jnp.where(is_small, amax * np.float32(-(2.0**64)), amax))
    return jnp.where(amax < 0, amax * np.float32(-(2.0**-64)), amax)


def _exponent_and_random_bits(exponent, keys, blocks):
    """Give each element the exponent of its block, and u32: a polynomial in its number
    i with random coefficients.

        keys + i mix(keys) + i**2 mix(mix(keys))

    Of three elements the high bits are independent. In a progression, without the
    square, those of two are, and one block in a hundred is rounded as a whole: the
    fourth moments of its sums are 80 to 200, where a coin's are 3. Without keys there
    are no random bits.
    """
    if keys is None:
        return each(exponent), None
    if _tpu.is_target():
        # Two numbers of 24 bits: half of a key, and the other half with an exponent.
        high = keys >> 16 | (exponent + 1).astype(jnp.uint32) << 16
        words = [_tpu.each(x.astype(jnp.int32)) for x in (keys & 0xFFFF, high)]
        low, high = lax.optimization_barrier(words)
        keys, exponent = (high << 16 | low).astype(jnp.uint32), (high >> 16) - 1
    else:
        keys, exponent = each(keys), each(exponent)
    places = lax.broadcasted_iota(jnp.uint32, blocks.shape, blocks.ndim - 1)
    i = places % np.uint32(BLOCK)
    linear = mix(keys)
    return exponent, keys + i * (linear + i * mix(linear))


def _fraction(magnitude, amax):
    """Divide by the amax: u in [0, 1], with an error of at most 1.5 ulp."""
    # The inverse of an amax above 2**126 would be subnormal. A sign tells that an
    # inverse is 2**32 times as large.
    is_large = amax > 1
    amax = jnp.where(is_large, amax * np.float32(2.0**-32), amax)
    inverse = _scaling.round_quotient(
        jnp.ones_like(amax), jnp.maximum(amax, np.float32(2.0**-126))
    )
    inverse = each(jnp.where(is_large, -inverse, inverse))
    unit = jnp.where(inverse < 0, np.float32(2.0**-32), np.float32(1))
    return jnp.minimum(magnitude * unit * jnp.abs(inverse), 1)


def _fixed_point(y):
    """Return the code of y in [0, 448] in e4m3, as an integer with 20 bits after the
    point.
    """
    multiple = (y * np.float32(512 << _DROPPED_BITS)).astype(jnp.int32)
    return jnp.where(
        y < _SMALLEST_NORMAL, multiple, _scaling.to_bits(y) - (_BIAS << 23)
    )


def _round_signed(u, y, exponent, random_bits):
    """Return the code, as an integer, of a neighbour of y = 448 u**k in e4m3, so that u
    keeps its mean.

    With the fractions that the neighbours decode to, the probability of the code above
    is

        (u - below) / (above - below)

    No product is added to anything here: compilers would round the two at once on some
    platforms.
    """
    code = _fixed_point(y) >> _DROPPED_BITS
    # Above the largest code is NaN; a u of 1 is not above the largest.
    codes = code, jnp.minimum(code + 1, NAN_CODE - 1)
    below, above = (
        _decoded_fraction(_numbers(c.astype(jnp.uint8)), exponent) for c in codes
    )
    draw = (random_bits >> 8).astype(jnp.int32).astype(u.dtype) * np.float32(2.0**-24)
    return code + (draw * (above - below) < u - below).astype(jnp.int32)


def _round_square(y, exponent, random_bits):
    """Return the code, as an integer, of a neighbour of y in [0, 448] in e4m3, so that
    x**(1/4) keeps its mean.

    With f of the gap below y, the probability of the code above is f + f (1 - f) c
    (15 - m) / 2**15, where m are the three bits of the code's significand and c is 68,
    102 or 119 for k = 1/2, 1 or 2. The gap is 1 / (8 + m) of y, for which (15 - m) /
    120 stands. To second order in it x**(1/4), a power a = 1 / (4 k) of y, keeps its
    mean with

        f + f (1 - f) (1 - a) / (2 (8 + m))

    The moving average adds up what rounding changes. Where x**p keeps its mean, an
    error of relative variance s in the root of x makes the mean of its inverse, and so
    the step of an optimizer, larger by (2 p - 1/2) s: by 0 for p = 1/4.
    """
    # 1. Write y as a code with 20 bits after the point.
    fixed_point = _fixed_point(y)
    code, fraction = fixed_point >> _DROPPED_BITS, fixed_point & _FRACTION

    # 2. Find the probability of the code above, in 20 bits: the product of fractions
    #    has 40.
    product = (fraction * ((_FRACTION + 1 - fraction) >> 9)) >> 11
    c = jnp.where(exponent > 0, 119, jnp.where(exponent < 0, 68, 102))
    probability = fraction + ((product * (15 - (code & 7)) * c) >> 15)

    # 3. Round up with that probability.
    return code + (
        (probability + (random_bits >> (32 - _DROPPED_BITS)).astype(jnp.int32))
        >> _DROPPED_BITS
    )


# A step of Adam -----------------------------------------------------------------------


def adam_step(*operands, vmap_dims):
    """Take the step of one leaf, as `jaxfp8.ops._adam_update.adam_update` says.

    The barrier keeps the averages, of which the numbers of blocks come first and then
    the codes. Between a product and a sum is always a selection: compilers would round
    the two at once on some platforms.
    """
    *params, keys, numbers, grads = operands
    *params, mu, mu_amax, mu_exponent, nu, nu_amax, nu_exponent = params
    mu, nu, grads = split(mu.view(jnp.uint8)), split(nu.view(jnp.uint8)), split(grads)
    numbers = lax.expand_dims(numbers, range(vmap_dims, grads.ndim))
    b1, one_less_b1, b2, one_less_b2, c1, c2, eps_root, eps, rate, decay, factor = (
        jnp.unstack(numbers, axis=-1)
    )

    # 1. Average, and find the largest and the smallest number of each block.
    g = _above(_above(grads, _SMALLEST_F32) * factor)
    m = _above(one_less_b1 * g) + _above(b1 * decoded(mu, mu_amax, mu_exponent))
    v = jnp.abs(decoded(nu, nu_amax, nu_exponent))
    v = _above(b2 * jnp.where(nu == INF_CODE, np.float32(np.inf), v), _LEAST_SQUARE)
    square = _above(g * g, _LEAST_SQUARE)
    v = _above(one_less_b2 * square, _LEAST_SQUARE) + v
    m, v, *spans = lax.optimization_barrier((m, v, span(m), span(v)))

    # 2. Compute the update and the codes.
    out = _above(m * c1 / (jnp.sqrt(_above(v * c2, _LEAST_SQUARE) + eps_root) + eps))
    if params:
        p = _above(split(params[0]), _SMALLEST_F32)
        out = _above(p - _above(rate * (out + _above(decay * p))), _SMALLEST_F32)
    shape = operands[-1].shape
    results, keys = [join(out, shape)], jnp.moveaxis(keys, vmap_dims, 0)
    for x, of_blocks, key, squared in zip(
        (m, v), spans, keys, (False, True), strict=True
    ):
        codes, exponent = encoded(x, *of_blocks, key, squared=squared)
        codes = jnp.where(jnp.abs(x) < np.inf, codes, NAN_CODE)
        codes = jnp.where(x == np.inf, INF_CODE, codes) if squared else codes
        data = codes.astype(jnp.uint8).view(E4M3.dtype)
        results += [join(data, shape), of_blocks[0], exponent]
    return results
