"""The moments of an optimizer in FP8: blocks of 128 elements, with an f32 amax each, and codes of expanded magnitudes.

A block with the amax a stores `448 u**k`, where `u = |x| / a`, in float8_e4m3fn. This range expansion (COAT,
arXiv:2410.19313) spends the format's range where the block has its numbers: halving a block's span in octaves allows to
double k, which halves its errors. Each block has the largest k of 2, 1 and 1/2 that its smallest element allows. These
powers are products and square roots, which are rounded the same on every platform.

An element that is not finite has the code of NaN and does not count in the amax: it spoils itself alone, as without
FP8.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import _mesh
from ..numerics import E4M3, _scaling
from ._blocks import amax_shape, block_sharding, join, split
from ._random import random_bits

_MAX = np.float32(E4M3.max)
_MAX_INV = np.float32(1 / E4M3.max)
_NAN_CODE = 0x7F
_DROPPED_BITS = 20  # of the significand of an f32, in e4m3
_FRACTION = (1 << _DROPPED_BITS) - 1
_BIAS = 120  # of the exponents of f32, less that of e4m3
_SMALLEST_NORMAL = np.float32(2.0**-6)
# The smallest u that k = 2 and k = 1 allow. Of both signs, 448 u**k is above half of the smallest code, so that nothing
# is flushed; of squares, whose roots divide, it is a normal number, with an error of 2**-4 at most.
_SIGNED_SPANS = (np.float32(2.0**-9.4), np.float32(2.0**-18.8))
_SQUARED_SPANS = (np.float32(2.0**-7.4), np.float32(2.0**-14.8))


class Moment(NamedTuple):
    """A moment in FP8; its class says how it is rounded.

    Attributes:
        data: float8_e4m3fn codes, in the shape of the moment.
        amax: f32, the largest finite magnitude of each block of 128 elements along one axis; 0 where all are 0.
        exponent: int8, the binary logarithm of the k of each block: 1, 0 or -1.
    """

    data: jax.Array
    amax: jax.Array
    exponent: jax.Array


class SignedMoment(Moment):
    """A moment of both signs, such as Adam's first: rounded to nearest."""


class SquaredMoment(Moment):
    """A moment of squares, such as Adam's second: rounded stochastically, and to zero only where it is zero.

    The steps of its slow average are smaller than half of the spacing of codes: to nearest, they would be lost. An
    optimizer divides by its root: a zero in place of a small number would be an update without bounds.
    """


def encode(kind: type[Moment], x: jax.Array, key: jax.Array | None = None) -> Moment:
    """Quantize a moment: the codes of `sign(x) 448 (|x| / amax)**k`.

    Args:
        kind: SignedMoment or SquaredMoment.
        x: the moment, in any float dtype; f32 is what it is computed in.
        key: of `leaf_key`, to round stochastically; None: to nearest.

    Returns:
        The moment, in the class `kind`.
    """
    return _mesh.on_auto_axes(functools.partial(_encode, kind), _shardings(kind, x), x, key)


def _encode(kind, x, key):
    # 1. Find the span of each block, and with it k.
    blocks, axis = split(x.astype(jnp.float32))
    magnitude = jnp.abs(blocks)
    is_number = (magnitude > 0) & (magnitude < np.inf)
    amax = jnp.max(jnp.where(is_number, magnitude, 0), axis + 1, keepdims=True)
    amin = jnp.min(jnp.where(is_number, magnitude, np.inf), axis + 1, keepdims=True)
    of_2, of_1 = _SQUARED_SPANS if kind is SquaredMoment else _SIGNED_SPANS
    exponent = jnp.where(amin >= amax * of_2, 1, jnp.where(amin >= amax * of_1, 0, -1)).astype(jnp.int8)

    # 2. Divide by the amax and take the power.
    u = _fraction(magnitude, amax)
    y = _MAX * jnp.where(exponent > 0, u * u, jnp.where(exponent < 0, _scaling.round_sqrt(u), u))

    # 3. Round. The smallest code stands for what is not zero.
    codes = _round_to_nearest(y) if key is None else _round_stochastically(y, exponent, random_bits(key, x.shape))
    if kind is SquaredMoment:
        codes = jnp.maximum(codes, (magnitude > 0).astype(jnp.int32))
    codes = jnp.where(magnitude < np.inf, codes, _NAN_CODE) | jnp.where(jnp.signbit(blocks), 0x80, 0)
    data = lax.bitcast_convert_type(codes.astype(jnp.uint8), E4M3.dtype)
    return kind(join(data, axis, x.shape), jnp.squeeze(amax, axis + 1), jnp.squeeze(exponent, axis + 1))


def decode(moment: Moment) -> jax.Array:
    """Compute the f32 elements of a moment: `sign(data) amax (|data| / 448)**(1 / k)`."""
    return _mesh.on_auto_axes(_decode, jax.typeof(moment.data).sharding, moment)


def _decode(moment):
    codes, axis = split(moment.data.astype(jnp.float32))
    power = jnp.abs(codes) * _MAX_INV
    exponent = jnp.expand_dims(moment.exponent, axis + 1)
    u = jnp.where(exponent > 0, _scaling.round_sqrt(power), jnp.where(exponent < 0, power * power, power))
    values = u * jnp.expand_dims(moment.amax, axis + 1)
    return join(lax.select(jnp.signbit(codes), -values, values), axis, moment.data.shape)


def encode_changes(moment: Moment, before: jax.Array, after: jax.Array, key: jax.Array | None) -> Moment:
    """Quantize `after` where a block differs from `before`, which `moment` decodes to; keep the codes of other blocks.

    So a step that changes nothing, of `optax.MultiSteps` or `optax.apply_if_finite`, changes no bit.
    """
    return _mesh.on_auto_axes(_encode_changes, _shardings(type(moment), moment.data), moment, before, after, key)


def _encode_changes(moment, before, after, key):
    new = _encode(type(moment), after, key)
    changed, axis = split(_bits(before) != _bits(after.astype(jnp.float32)))
    keep = ~jnp.any(changed, axis + 1, keepdims=True)
    keep_element = join(jnp.broadcast_to(keep, changed.shape), axis, before.shape)
    keep = jnp.squeeze(keep, axis + 1)
    kept = (keep_element, keep, keep)
    return type(moment)(*(jnp.where(mask, old, new) for mask, old, new in zip(kept, moment, new, strict=True)))


def _shardings(kind, x):
    """Return how a moment lies on the mesh that x is on."""
    sharding = jax.typeof(x).sharding
    of_blocks = block_sharding(sharding, amax_shape(x.shape))
    return kind(sharding, of_blocks, of_blocks)


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _fraction(magnitude, amax):
    """Divide by the amax: u in [0, 1], off by 1.5 ulp."""
    # The inverse of an amax above 2**126 would be subnormal.
    unit = jnp.where(amax > 1, np.float32(2.0**-32), np.float32(1))
    inverse = _scaling.round_quotient(jnp.ones_like(amax), jnp.maximum(amax * unit, np.float32(2.0**-126)))
    return jnp.minimum(magnitude * unit * inverse, 1)


def _round_to_nearest(y):
    """Return the code, as an integer, of the number in e4m3 that is nearest to y in [0, 448]; ties to even."""
    bits = _bits(y)
    odd = (bits >> _DROPPED_BITS) & 1
    normal = ((bits + (_FRACTION >> 1) + odd) >> _DROPPED_BITS) - (_BIAS << 3)
    return jnp.where(y < _SMALLEST_NORMAL, jnp.round(y * 512).astype(jnp.int32), normal)


def _round_stochastically(y, exponent, random_bits):
    """Return the code, as an integer, of a neighbour of y in [0, 448] in e4m3, so that x**(1/4) keeps its mean.

    With f of the gap below y, the probability of the code above is f + f (1 - f) c (15 - m) / 2**15, where m are the
    three bits of the code's significand and c is 68, 102 or 119 for k = 1/2, 1 or 2. The gap is 1 / (8 + m) of y, for
    which (15 - m) / 120 stands. To second order in it x**(1/4), a power a = 1 / (4 k) of y, keeps its mean with

        f + f (1 - f) (1 - a) / (2 (8 + m))

    The moving average adds up what rounding changes. Where x**p keeps its mean, an error of relative variance s in the
    root of x makes the mean of its inverse, and so the step of an optimizer, larger by (2 p - 1/2) s: by 0 for p = 1/4.
    """
    # 1. Write y as a code with 20 bits after the point.
    multiple = (y * np.float32(512 << _DROPPED_BITS)).astype(jnp.int32)
    fixed_point = jnp.where(y < _SMALLEST_NORMAL, multiple, _bits(y) - (_BIAS << 23))
    code, fraction = fixed_point >> _DROPPED_BITS, fixed_point & _FRACTION

    # 2. Find the probability of the code above, in 20 bits: the product of fractions has 40.
    product = (fraction * ((_FRACTION + 1 - fraction) >> 9)) >> 11
    c = jnp.where(exponent > 0, 119, jnp.where(exponent < 0, 68, 102))
    probability = fraction + ((product * (15 - (code & 7)) * c) >> 15)

    # 3. Throw the dice.
    return code + ((probability + (random_bits & _FRACTION).astype(jnp.int32)) >> _DROPPED_BITS)
