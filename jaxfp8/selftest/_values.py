"""The numbers that ops are checked on: spread over many octaves, with NaN, infinities and subnormals among them."""

import jax.numpy as jnp
import numpy as np

_TINY = 2.0**-149
_HARD = np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0, _TINY, -_TINY, 2.0**-126, -3e38, 6e4, 448.0, 2.0**-10])
_SCALES = np.float32([1, 3.7, 2.0**-7, 2.0**40, 2.0**-126, 2.0**126])
# Larger arrays repeat this many numbers; it is a prime, so that no two tiles are alike.
_PERIOD = 999_983


def numbers(rng, shape, dtype, *, hard: bool = False, octaves: float = 4.0) -> np.ndarray:
    """Return normal numbers times powers of two; `hard` puts NaN, infinities, subnormals and large numbers in."""
    size = int(np.prod(shape))
    spread = 2.0 ** (octaves * rng.standard_normal(min(size, _PERIOD)))
    values = np.resize((rng.standard_normal(spread.size) * spread).astype(np.float32), size)
    if hard:
        values[rng.permutation(size)[: _HARD.size]] = _HARD[:size]
    with np.errstate(over="ignore", invalid="ignore"):  # float16
        return values.reshape(shape).astype(dtype)


def codes(rng, shape, form, *, hard: bool = False) -> np.ndarray:
    """Return FP8 codes of normal numbers that use the range of the format; `hard` puts a NaN in."""
    values = numbers(rng, min(int(np.prod(shape)), _PERIOD), np.float32, octaves=1) * np.float32(form.max / 16)
    if hard:
        values[values.size // 3] = np.nan
    return np.resize(np.clip(values, -form.max, form.max).astype(form.dtype), shape)


def scale(rng) -> np.ndarray:
    """Return a random scale f32[1] that may be ordinary, large or small."""
    return rng.choice(_SCALES, 1)


def factors(rng, shape, octaves: float = 4.0) -> np.ndarray:
    """Return positive f32 numbers between `2**-octaves` and `2**octaves`."""
    return np.exp2(rng.uniform(-octaves, octaves, shape)).astype(np.float32)


def on_tpu(x: np.ndarray) -> np.ndarray:
    """Return x as a TPU may read it: in float32 and bfloat16 numbers below 2**-126 are zeros, and NaNs have no sign."""
    if x.dtype not in (np.float32, jnp.bfloat16):
        return x
    zero, nan = np.zeros_like(x), np.full_like(x, np.nan)
    return np.where(np.isnan(x), nan, np.where(np.abs(x) < np.float32(2.0**-126), zero, x))
