"""The arithmetic of scales and amax histories, in f32 and to the bit on every platform.

Two things differ between platforms and are avoided here. XLA's CPU threads treat
subnormal floats as zero: amaxes are compared and reduced as integers, because the bits
of non-negative floats sort like the floats. XLA's GPU compiler emits a division that is
off by up to 2 ulp (`div.full.f32`): quotients are rounded by integer arithmetic.

A constant is written in the shape of its operand, which is one operation in the
program. jnp's promotion takes three operations, and XLA moves some of them out of a
loop, into launches of their own.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _tpu

# Scales stay in [2**-126, 2**126], so that a scale and its inverse are both normal
# floats.
MAX_SCALE = 2.0**126
MIN_SCALE = 2.0**-126

_INF_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
_HIDDEN_BIT = 0x00800000


def to_bits(x):
    """Return the bits of f32 as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits):
    """Return the f32 of these bits, 32-bit integers."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def _full(x, value, dtype):
    """Return `value`, a number or one for each column, in the shape of `x`: a literal
    where it has few elements.
    """
    is_small = (
        all(isinstance(size, int) for size in x.shape) and math.prod(x.shape) <= 64
    )
    if is_small:
        return np.full(x.shape, value, dtype)
    if np.ndim(value):
        return jnp.broadcast_to(np.asarray(value, dtype), x.shape)
    return lax.full_like(x, value, dtype)


def positive_finite(x):
    """Return whether `0 < x < inf`, subnormals included."""
    # unsigned: negative numbers and NaN are above inf
    bits = x.view(jnp.uint32)
    below_zero = bits - _full(bits, 1, np.uint32)  # 0 wraps around
    return lax.lt(below_zero, _full(bits, _INF_BITS - 1, np.uint32))


def below_zero(x):
    """Return whether `-inf <= x < 0`, subnormals included.

    No training step makes such state: an optimizer has stepped on it.
    """
    # -0 and negative NaN are just outside
    bits = x.astype(jnp.float32).view(jnp.uint32)
    return lax.lt(
        bits - _full(bits, 0x80000001, np.uint32), _full(bits, _INF_BITS, np.uint32)
    )


def clean(x):
    """Return state as f32, with 0 in place of an entry that is negative or not
    finite.
    """
    x = x.astype(jnp.float32)
    return lax.select(positive_finite(x), x, np.zeros(x.shape, np.float32))


def abs_max(x, axis=None):
    """Compute the max of |x| as f32, where NaN counts as +inf; 0 for an empty array.

    The NaN is counted before the reduction: a float max may lose it (XLA:CPU does for
    n >= 4096).
    """
    if _tpu.is_target():
        return _tpu.abs_max(x, axis)
    bits = to_bits(x.astype(jnp.float32)) & 0x7FFFFFFF
    bits = jnp.minimum(bits, _INF_BITS)
    return from_bits(jnp.max(bits, axis=axis, initial=0))


def round_quotient(x, y):
    """Divide x by y, correctly rounded, for positive normal f32 x and y with a normal
    quotient.

    The division of the platform may be off by a few ulp, in [1, 2). The quotient of the
    significands is an integer of 24 bits, up to rounding. With an estimate of that
    integer the remainder is small. 32 bits hold the remainder and not the products:
    these wrap around, and their difference is exact. A quotient of two floats is never
    halfway between two floats, so there are no ties.
    """

    # 1. Split both numbers into significands, as integers, and exponents.
    def number(value, dtype=np.int32):
        return _full(x, value, dtype)

    x_bits, y_bits = to_bits(x), to_bits(y)
    x_int, y_int = (
        (bits & number(_MANTISSA_BITS)) | number(_HIDDEN_BIT)
        for bits in (x_bits, y_bits)
    )
    is_smaller = x_int < y_int
    smaller = is_smaller.astype(jnp.int32)
    shift = number(23) + smaller

    # 2. Estimate the quotient of the significands, 24 bits, and correct it by its
    #    remainder.
    x_float, y_float = x_int.astype(jnp.float32), y_int.astype(jnp.float32)
    unit = lax.select(
        is_smaller, number(2.0**24, np.float32), number(2.0**23, np.float32)
    )
    quotient = (lax.div(x_float, y_float) * unit).astype(jnp.int32)
    # wraps around; below 2**28 in magnitude
    remainder = (x_int << shift) - quotient * y_int
    step = jnp.round(remainder.astype(jnp.float32) / y_float).astype(jnp.int32)
    quotient, remainder = quotient + step, remainder - step * y_int
    twice = remainder + remainder
    quotient = (
        quotient
        + (twice > y_int).astype(jnp.int32)
        - (twice < -y_int).astype(jnp.int32)
    )

    # 3. Put the quotient together.
    exponent = (x_bits >> number(23)) - (y_bits >> number(23)) + number(127) - smaller
    return from_bits((exponent << number(23)) + (quotient - number(_HIDDEN_BIT)))


def round_sqrt(x):
    """Compute the square root, correctly rounded, of an f32 x that is 0 or positive and
    normal; no NaN of a NaN.

    `jnp.sqrt` is off by an ulp on some platforms. The root q of the significand is an
    integer of 24 bits, and the nearest one leaves a remainder in `(-q, q]`; as in
    `round_quotient`, 32 bits hold it. That of 0 is 0 as well.
    """
    bits, q_bits = to_bits(x), to_bits(jnp.sqrt(x))
    # The significand as an even power of two has it; the bias of exponents is odd. Its
    # upper bits wrap around.
    square = bits << (24 - (bits >> 23 & 1))
    q = (q_bits & _MANTISSA_BITS) | _HIDDEN_BIT
    remainder = square - q * q
    step = (remainder > q).astype(jnp.int32) - (remainder <= -q).astype(jnp.int32)
    return from_bits(q_bits + step)


def scale_numerator(fp8_max, margin):
    """Return `fp8_max / 2**margin`: with the power of two in the numerator a scale
    takes one division and rounding.
    """
    return np.float32(fp8_max * 2.0**-margin)


def amax_to_scale(amax, old_scale_inv, numerator):
    """Return `(scale, scale_inv)`: the scale that maps `amax` to `numerator`, or
    `1 / old_scale_inv`.

    Both are NaN if `amax` or `old_scale_inv` is below zero. Else the scale is
    `numerator / amax` if `0 < amax < inf`, else `1 / old_scale_inv` if
    `0 < old_scale_inv < inf`, else 1; it is clamped to [2**-126, 2**126].
    """
    # Clamping the amax clamps the scale. The second bound keeps subnormal amaxes, which
    # pass the first bound only with a margin above 8, out of the division: they count
    # as 2**-126.
    smallest = np.maximum(
        np.float64(numerator) / MAX_SCALE, np.finfo(np.float32).tiny
    ).astype(np.float32)
    largest = np.minimum(
        np.float64(numerator) / MIN_SCALE, np.finfo(np.float32).max
    ).astype(np.float32)

    def number(value):
        return _full(amax, value, np.float32)

    amax_in_range = lax.clamp(number(smallest), amax, number(largest))
    stored_in_range = lax.clamp(number(MIN_SCALE), old_scale_inv, number(MAX_SCALE))
    stored_in_range = lax.select(
        positive_finite(old_scale_inv), stored_in_range, number(1)
    )

    has_amax = positive_finite(amax)
    scale = round_quotient(
        lax.select(has_amax, number(numerator), number(1)),
        lax.select(has_amax, amax_in_range, stored_in_range),
    )
    is_state = ~(below_zero(amax) | below_zero(old_scale_inv))
    scale_inv = round_quotient(number(1), scale)
    return lax.select(is_state, scale, number(np.nan)), lax.select(
        is_state, scale_inv, number(np.nan)
    )


def floor_to_power_of_two(scale):
    """Round an f32 scale in [2**-126, 2**126] down to a power of two; return
    `(scale, scale_inv)`.
    """
    bits = to_bits(scale) & _INF_BITS
    inverse = (254 << 23) - bits  # exponents of x and 1 / x add up to twice the bias
    return from_bits(bits), from_bits(inverse)
