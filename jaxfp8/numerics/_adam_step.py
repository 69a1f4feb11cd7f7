"""A step of Adam on moments in FP8, for one leaf of the parameters."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _tpu
from ._codec import E4M3
from ._moment_codec import (
    INF_CODE,
    NAN_CODE,
    decoded,
    each,
    each_amax,
    encoded,
    join,
    span,
    split,
)

_SMALLEST_F32 = np.float32(2.0**-126)
# The smallest terms of a step, of which no difference or sum is subnormal.
_LEAST = np.float32(2.0**-102)
_LEAST_SQUARE = np.float32(2.0**-125)


def adam_step(grads, *operands, axis, vmap_dims):
    """Take the step of one leaf, as `jaxfp8.ops._adam_update.adam_update` says.

    It reads its operands twice: for the numbers of blocks, and for the codes. The
    barriers keep XLA from storing what both have in common, which would be more bytes
    than the moments. TPUs store it: their memory moves more bytes while they decode.
    Between a product and a sum is always a selection: compilers would round the two at
    once on some platforms.
    """
    *params, mu, mu_amax, mu_exponent, nu, nu_amax, nu_exponent, keys, numbers = (
        operands
    )
    keys = jnp.moveaxis(keys, vmap_dims, 0)
    block_dims = grads.ndim + (not _tpu.is_target())
    broadcast = (*numbers.shape[:vmap_dims], *[1] * (block_dims - vmap_dims), 11)
    b1, one_less_b1, b2, one_less_b2, c1, c2, eps_root, eps, rate, decay, factor = (
        jnp.unstack(numbers.reshape(broadcast), axis=-1)
    )
    mu_scales, nu_scales = (
        (each_amax(amax, axis), each(exponent, axis))
        for amax, exponent in ((mu_amax, mu_exponent), (nu_amax, nu_exponent))
    )
    mu, nu = (lax.bitcast_convert_type(x, jnp.uint8) for x in (mu, nu))

    def moments(grads, mu, nu):
        grads, mu_codes, nu_codes = (split(x, axis) for x in (grads, mu, nu))
        g = _above(_above(grads, _SMALLEST_F32) * factor)
        before = decoded(nu_codes, *nu_scales)
        before = jnp.where(nu_codes == np.uint8(INF_CODE), np.float32(np.inf), before)
        mean = _above(one_less_b1 * g) + _above(b1 * decoded(mu_codes, *mu_scales))
        square = _above(g * g, _LEAST_SQUARE)
        return mean, _above(one_less_b2 * square, _LEAST_SQUARE) + _above(
            b2 * jnp.abs(before), _LEAST_SQUARE
        )

    # 1. Find the largest and the smallest number of each block.
    if _tpu.is_target():
        both = moments(grads, mu, nu)
        (m, v), spans = lax.optimization_barrier((both, [span(x, axis) for x in both]))
    else:
        once = lax.optimization_barrier((grads, mu, nu))
        spans = [span(x, axis) for x in moments(*once)]
        twice, spans = lax.optimization_barrier((once, spans))
        m, v = moments(*twice)

    # 2. Compute the update and the codes.
    out = _above(m * c1 / (jnp.sqrt(_above(v * c2, _LEAST_SQUARE) + eps_root) + eps))
    if params:
        p = _above(split(params[0], axis), _SMALLEST_F32)
        out = _above(p - _above(rate * (out + _above(decay * p))), _SMALLEST_F32)
    results = [join(out, axis, grads.shape)]
    for x, (top, bottom), key, squared in (
        (m, spans[0], keys[0], False),
        (v, spans[1], keys[1], True),
    ):
        codes, exponent = encoded(x, top, bottom, key, squared, axis)
        codes = jnp.where(jnp.abs(x) < np.inf, codes, NAN_CODE)
        codes = jnp.where(x == np.inf, INF_CODE, codes) if squared else codes
        data = lax.bitcast_convert_type(codes.astype(jnp.uint8), E4M3.dtype)
        results += [join(data, axis, grads.shape), top, exponent]
    return results


def _above(x, least=_LEAST):
    """Return 0 in place of what is below `least`."""
    return jnp.where(jnp.abs(x) < least, np.float32(0), x)
