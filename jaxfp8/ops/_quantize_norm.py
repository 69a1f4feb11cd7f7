"""quantize_norm: RMSNorm or LayerNorm and its quantization in one pass, without the
norm's result in memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import _checks
from ._primitive import dims
from ._quantize_transpose import Producer

KINDS = ("rms", "layer")


def normalize(
    x: ArrayLike, gamma: ArrayLike, beta: ArrayLike | None, kind: str, epsilon: float
) -> jax.Array:
    """Normalize the last dimension by RMSNorm or LayerNorm, in f32 and rounded once to
    x's dtype; differentiable.

        "rms"     x * (rsqrt(mean(x**2) + epsilon) * gamma)
        "layer"   (x - mean(x)) * (rsqrt(mean((x - mean(x))**2) + epsilon) * gamma)
                  + beta

    These are RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450) as in Flax's
    nn.RMSNorm and nn.LayerNorm. The variance is that of the centered values, as with
    `use_fast_variance=False`; Flax's default, `max(0, mean(x**2) - mean(x)**2)`, is the
    same number with a larger rounding error where the mean is large.

    Args:
        x: bfloat16, float16 or float32 `[..., n]`.
        gamma: bfloat16, float16 or float32 `[n]`.
        beta: like gamma, or None; "rms" takes no beta.
        kind: "rms" or "layer".
        epsilon: a finite number of at least 0; see the formulas.

    Returns:
        `[..., n]` of x's dtype.

    Raises:
        TypeError: x, gamma or beta has another dtype.
        ValueError: an argument has another shape, `kind` is not one of these, beta is
            given with "rms", or epsilon is negative or not finite.
    """
    x, gamma, beta, epsilon = checked("normalize", x, gamma, beta, kind, epsilon)
    statistics, parameters = _statistics(x, kind, epsilon), _parameters(gamma, beta)
    return _affine(x, statistics, parameters).astype(x.dtype)


def _parameters(gamma, beta):
    """Return `[gamma, beta]` in f32, without a beta that is None."""
    return [p.astype(jnp.float32) for p in (gamma, beta) if p is not None]


def _statistics(x, kind, epsilon):
    """Return `[rstd, mean]` of each row, f32 `[..., 1]`; no mean for "rms"."""
    x, mean = x.astype(jnp.float32), []
    if kind == "layer":
        mean = [_mean(x)]
        x = x - mean[0]
    variance = _mean(x * x)
    epsilon = jax.lax.full((1,) * x.ndim, epsilon, jnp.float32)
    return [jax.lax.rsqrt(variance + epsilon), *mean]


def _mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def _affine(x, statistics, parameters):
    """Compute `(x - mean) * (rstd * gamma) + beta` in f32, where mean and beta may be
    missing.
    """
    # Parameters have the vmapped dimensions and n. They broadcast over the batch and
    # the rows in between.
    gamma, *beta = [
        p.reshape(*p.shape[:-1], *[1] * (x.ndim - p.ndim), p.shape[-1])
        for p in parameters
    ]
    rstd, *mean = statistics
    x = x.astype(jnp.float32)
    if mean:
        x = x - mean[0]
    y = x * (rstd * gamma)
    if beta:
        y = y + beta[0]
    return y


def quantize_norm(x, gamma, beta, scale, dtype, *, kind, epsilon, amax=None, **options):
    """Quantize `normalize(x, gamma, beta, kind, epsilon)`, kept in f32.

    On a GPU XLA computes the statistics of the rows of x, if possible in the pass that
    writes x. The kernel then reads x once.

    Equivalent to, without a rounding in between:

        y = normalize(x.astype(f32), gamma, beta, kind, epsilon)
        data, data_t, amax = quantize_transpose(y, scale, dtype, rows=rows)

    up to the rounding errors of y, mostly those of the sums over n. Where such an error
    decides between two codes, implementations may differ by one code. A y that is not
    finite gives a NaN code and an infinite amax. A NaN in x makes all y of its row NaN,
    and so does an Inf for "layer"; for "rms" an Inf makes its own y NaN and the rest of
    its row 0, as in Flax.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`.
        gamma: bfloat16, float16 or float32 `[n]`.
        beta: like gamma, or None; "rms" takes no beta.
        scale: f32[] or f32[1], the factor of y.
        dtype: float8_e4m3fn or float8_e5m2.
        kind: "rms" or "layer"; see `normalize`.
        epsilon: a finite number of at least 0; see `normalize`.
        transpose: whether to return data_t.
        amax, with_amax: see `quantize`.
        rows: the number of dimensions that m stands for.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` (or None) of
        `dtype`, the amax of y.

    Raises:
        TypeError: scale, dtype or amax has another dtype; or the op is differentiated.
        ValueError: scale or amax has another shape.
    """
    # The statistics of a row are known only after the whole row was read. XLA computes
    # them, if possible in the pass that writes x. Statistics and parameters are small:
    # in f32 the kernel needs no variant for each dtype.
    statistics, parameters = _statistics(x, kind, epsilon), _parameters(gamma, beta)
    more = jnp.concatenate(statistics, axis=-1), *parameters
    return _QuantizeNorm.quantize(
        x, scale, more, amax, dtype, has_beta=beta is not None, **options
    )


def checked(op, x, gamma, beta, kind, epsilon, names=("gamma", "beta")):
    """Check the arguments: arrays, and an epsilon of f32. `names` are those of gamma
    and beta in messages.
    """
    _checks.one_of(op, "kind", kind, KINDS)
    x = _checks.high_precision(op, "x", x, 1)

    def parameter(name, value):
        value = _checks.high_precision(op, name, value)
        return _checks.shape(op, name, value, x.shape[-1:])

    gamma = parameter(names[0], gamma)
    if beta is not None:
        if kind == "rms":
            raise ValueError(
                f'{op}: {names[1]}: expected None for kind "rms", got an array; '
                '"layer" takes one'
            )
        beta = parameter(names[1], beta)
    # The program has epsilon in f32, so the check and the result take the f32 number.
    if not 0 <= np.float32(epsilon) < np.inf:
        raise ValueError(
            f"{op}: epsilon: expected a finite number of at least 0, got {epsilon!r}"
        )
    return x, gamma, beta, float(np.float32(epsilon))


class _QuantizeNorm(Producer):
    name = "quantize_norm"
    has_beta: bool = False

    def operand_parts(self, row, col):
        statistics = row, dims("whole_statistic", 1)
        return [(row, col), statistics, *[(col,)] * (1 + self.has_beta)]

    def extras(self):
        if self.has_beta:
            return []
        return [jnp.zeros((0,), jnp.float32)]  # a beta of [0] is none

    def produce(self, x, statistics, *parameters):
        columns = [statistics[..., i : i + 1] for i in range(statistics.shape[-1])]
        return _affine(x, columns, parameters)
