"""quantize: to FP8 with a given scale, and the amax, in one read."""

import jax.numpy as jnp

from .. import scaling
from ..formats import FP8_DTYPES
from . import _checks, _ffi
from ._primitive import grouped_op
from ._reference import encode


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
    dtype = _checks.dtype("quantize", "dtype", dtype, FP8_DTYPES)
    data, amax = _groups(x.reshape(1, -1), scale, dtype=dtype)
    return data.reshape(x.shape), amax.reshape(())


def _results(x, scale, dtype):
    del scale
    return [(x.shape, dtype), ((x.shape[0],), jnp.float32)]


def _reference(x, scale, dtype):
    return encode(x, scale[:, None], dtype), scaling.abs_max(x, axis=1)


def _custom_call(x, scale, dtype):
    return _ffi.call("quantize", _results(x, scale, dtype), x, scale)


# x `[g, n]`, scale f32 `[1]` or `[g]` -> data `[g, n]`, amax f32 `[g]`.
_groups = grouped_op(
    "quantize", results=_results, reference=_reference, cpu=_custom_call, cuda=_custom_call, is_scale=(False, True)
)
