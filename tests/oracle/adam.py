"""The oracle of a step of Adam on moments in FP8, `[g, n]`: numpy, each operation
rounded once.
"""

import numpy as np

from oracle import E4M3, F32, bits, moments

LEAST, LEAST_SQUARE = 2.0**-102, 2.0**-125


def flushed(x, least=LEAST):
    """Zero where |x| is below `least`: no product here is a subnormal number on any
    platform.
    """
    return np.where(np.abs(x) < F32(least), F32(0), x).astype(F32)


def without_subnormals(x):
    return np.where(np.abs(x) < F32(2.0**-126), F32(0), x).astype(F32)


def decoded_square(data, amax, exponent):
    """A code of NaN with a sign stands for infinity."""
    return np.where(
        bits(data) == 0xFF, F32(np.inf), moments.decode(data, amax, exponent)
    )


def encoded(x, keys, squared):
    """As a moment is encoded, whatever the block was; NaN and infinite elements have
    codes without their signs.
    """
    data, amax, exponent = moments.encode_all(x, keys, squared)
    codes = np.where(np.isfinite(x), bits(data), 0x7F)
    if squared:
        codes = np.where(np.isposinf(x), 0xFF, codes)
    return codes.astype(np.uint8).view(E4M3.dtype), amax, exponent


def step(grads, params, mu, nu, mu_keys, nu_keys, hyper):
    """`(out, mu, nu)`: the update, or the next parameters where there are some; moments
    are (data, amax, exponent).

    `hyper` is f32 `[h, 11]`, each row for `g / h` rows of the others.
    """
    hyper = (
        np.repeat(hyper, len(grads) // len(hyper), axis=0) if len(grads) else hyper[:0]
    )
    (
        b1,
        one_less_b1,
        b2,
        one_less_b2,
        unbias_mu,
        unbias_nu,
        eps_root,
        eps,
        rate,
        decay,
        factor,
    ) = hyper.T[..., None]
    with np.errstate(all="ignore"):
        g = flushed(without_subnormals(grads) * factor)
        m = flushed(one_less_b1 * g) + flushed(b1 * moments.decode(*mu))
        square, before = flushed(g * g, LEAST_SQUARE), np.abs(decoded_square(*nu))
        v = flushed(one_less_b2 * square, LEAST_SQUARE) + flushed(
            b2 * before, LEAST_SQUARE
        )
        out = flushed(m * unbias_mu / (np.sqrt(v * unbias_nu + eps_root) + eps))
        if params is not None:
            p = without_subnormals(params)
            out = without_subnormals(p - flushed(rate * (out + flushed(decay * p))))
    return out, encoded(m, mu_keys, False), encoded(v, nu_keys, True)
