"""The arithmetic of scales and amax histories, in f32 and to the bit.

XLA's CPU threads treat subnormal floats as zero, other platforms do not. Amaxes are therefore compared and reduced as
integers: the bits of non-negative floats sort like the floats.
"""

import jax.numpy as jnp
from jax import lax

# Scales stay in [2**-126, 2**126], so that a scale and its inverse are both normal floats.
MAX_SCALE = 2.0**126
MIN_SCALE = 2.0**-126

_INF_BITS = 0x7F800000


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def positive_finite(x):
    """`0 < x < inf`, subnormals included."""
    bits = _bits(x)
    return (bits > 0) & (bits < _INF_BITS)


def clean(x):
    """f32 view of stored state in which an entry that is negative or not finite is 0."""
    x = x.astype(jnp.float32)
    return jnp.where(positive_finite(x), x, jnp.float32(0))


def abs_max(x, axis=None):
    """Max of |x| as f32 where NaN counts as +inf; 0 where there is nothing to reduce.

    The NaN is counted before the reduction: a float max may lose it (XLA:CPU does for n >= 4096).
    """
    bits = _bits(x.astype(jnp.float32)) & 0x7FFFFFFF
    bits = jnp.minimum(bits, _INF_BITS)
    return lax.bitcast_convert_type(jnp.max(bits, axis=axis, initial=0), jnp.float32)


def amax_to_scale(amax, fp8_max: float, margin: float, default):
    """The scale that maps `amax` to `fp8_max / 2**margin`.

    `min(fp8_max / amax / 2**margin, 2**126)` where `0 < amax < inf`, else `default`. The power of two is folded into
    the numerator: one division, one rounding.
    """
    scale = jnp.float32(fp8_max * 2.0**-margin) / amax
    scale = jnp.clip(scale, jnp.float32(MIN_SCALE), jnp.float32(MAX_SCALE))
    return jnp.where(positive_finite(amax), scale, default)


def stored_to_scale(stored):
    """The scale that a stored Flax scale (`scale_inv`) stands for; 1 if it is not a positive number."""
    stored = stored.astype(jnp.float32)
    scale = jnp.clip(1 / stored, jnp.float32(MIN_SCALE), jnp.float32(MAX_SCALE))
    return jnp.where(positive_finite(stored), scale, jnp.float32(1))


def push_history(history, amax):
    """`history` with its oldest entry dropped and `amax` in slot 0; an amax that is not finite is recorded as 0.

    The stored order is TransformerEngine's picture *before rotation*: slot 0 newest, slot 1 oldest.
    """
    return jnp.roll(history, -1).at[0].set(clean(amax))
