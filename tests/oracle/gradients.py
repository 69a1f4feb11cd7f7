"""The gradients of activations in float64, and how far an f32 implementation may be
from them; shares no code with the package.
"""

import numpy as np

from oracle import Values, producers, widen

_U = 2.0**-24


def activation(x, grad, name, grad_bound=0.0) -> Values:
    """The gradient of `oracle.activation(x, name)` with respect to x, of its shape,
    from that of its result.

    With a function a s(z), its derivative is s + a s (1 - s) z'. As in
    oracle.activation s is off by (5 |z| + 8) u of itself, and so 1 - s by (5 |z| + 9) u
    absolutely; from z = 25 on 1 + exp(-z) is 1 in f32, s is 1 and 1 - s below 2^-36,
    whatever x and z' are. z' and the products add less than 16 u; an s that is flushed,
    below 2^-126, at most 2^-116 of the gradient: there x z' is below 2^9, and s falls
    faster than x z' grows.

    A clamped SwiGLU has these derivatives at its clamped gate, with z' = alpha, and up
    + offset, and 0 beyond the limit. That sum is one of the roundings of `_times`. The
    derivative of the square of max(x, 0) is 2 x.

    Args:
        x: `[..., n]`, gated `[..., 2, n]`.
        grad: of the result, `[..., n]`; it is off by `grad_bound`.
        name: of the activation; or a clamped SwiGLU.
    """
    x, grad = widen(x, np.float64), widen(grad, np.float64)
    is_clamped = not isinstance(name, str)
    gated = is_clamped or name.endswith("_gated")
    gate, up = (x[..., 0, :], x[..., 1, :]) if gated else (x, np.ones_like(x))
    beyond = [False, False]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if not is_clamped and name.startswith("relu"):
            f = np.maximum(gate, 0)
            f_bound = 0.0
            slope = 2 * gate if "squared" in name else np.ones_like(gate)
            df = np.where(gate <= 0, 0.0, slope)
            df_bound = 0.0
        else:
            if is_clamped:
                gate, up, limit, alpha, offset = producers.clamped(x, name)
                beyond = [x[..., 0, :] > limit, np.abs(x[..., 1, :]) > limit]
                up, z, dz = up + offset, alpha * gate, alpha
            else:
                z, dz = producers.argument(gate, name)
            s, rest = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
            off = (5 * np.abs(z) + 24) * _U
            inner = np.where(rest == 0, 0, np.where(s == 0, 0, gate * s * rest * dz))
            inner_off = np.where(z >= 25, np.abs(inner), np.abs(gate) * s * dz * off)
            f, f_bound = gate * s, np.abs(gate * s) * off
            df = s + inner
            df_bound = np.where(s == 0, 0, s * np.minimum(off, 1) + inner_off)
        factors = [(df * up, df_bound * np.abs(up)), (f, f_bound)][: 1 + gated]
        parts = [
            np.where(is_beyond, 0.0, _times(grad, grad_bound, *factor))
            for factor, is_beyond in zip(factors, beyond, strict=False)
        ]
    exact, bound = (
        np.stack(part, axis=-2) if gated else part[0]
        for part in zip(*parts, strict=True)
    )
    return Values(exact, np.where(np.isfinite(exact), bound, 0))


def _times(grad, grad_bound, factor, factor_bound):
    """A gradient times a factor, both with errors, and some roundings:
    `(exact, bound)`.
    """
    exact, size = grad * factor, np.abs(grad) + grad_bound
    bound = grad_bound * np.abs(factor) + size * factor_bound
    return exact, bound + 8 * _U * (np.abs(exact) + size * factor_bound) + 2.0**-116 * (
        1 + size
    )
