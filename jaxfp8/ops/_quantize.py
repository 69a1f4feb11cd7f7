"""quantize: to FP8 with a given scale, and the amax, in one read."""

import functools

import jax
import jax.numpy as jnp

from .. import scaling
from ..formats import FP8_DTYPES
from . import _checks, _ffi
from ._implementation import by_platform
from ._reference import encode
from ._transforms import grouped, not_differentiable


def quantize(x, scale, dtype):
    """Quantizes `x` and finds its amax with one read of `x`.

    Equivalent to, with `y = x.astype(f32) * scale`:

        data = jnp.clip(y, -FP8_MAX, FP8_MAX).astype(dtype)        # NaN where x is not finite
        amax = jnp.max(jnp.abs(x))                                 # as ops.amax

    One multiplication in f32, one rounding to nearest even. Finite values saturate at FP8_MAX (448 for float8_e4m3fn,
    57344 for float8_e5m2), also when the product overflows; an Inf or NaN in `x` gives a NaN code in both formats.

    Args:
        x: bfloat16, float16 or float32, any shape.
        scale: f32[] or f32[1]; multiplies.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        `(data, amax)`: data of `dtype` with the shape of x, amax f32[].

    Raises:
        TypeError: x, scale or dtype has another dtype; or the op is differentiated.
        ValueError: scale has another shape.
    """
    x = _checks.high_precision("quantize", "x", x)
    scale = _checks.scale("quantize", "scale", scale)
    return _quantize(x, scale, _checks.dtype("quantize", "dtype", dtype, FP8_DTYPES))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _quantize(x, scale, dtype):
    @not_differentiable("quantize")
    def run(x, scale):
        data, amax = _groups(dtype)(x.reshape(1, -1), scale)
        return data.reshape(x.shape), amax.reshape(())

    return run(x, scale)


@functools.cache
def _groups(dtype):
    """Canonical form: x `[g, n]`, scale f32 `[1]` or `[g]` -> data `[g, n]`, amax f32 `[g]`."""

    def reference(x, scale):
        return encode(x, scale[:, None], dtype), scaling.abs_max(x, axis=1)

    def custom_call(x, scale):
        return tuple(_ffi.call("quantize", [(x.shape, dtype), ((x.shape[0],), jnp.float32)], x, scale))

    return grouped(by_platform(reference, cpu=custom_call, cuda=custom_call))
