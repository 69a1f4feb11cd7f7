"""quantize_transpose: to FP8 in both layouts, and the amax, in one read."""

import functools

import jax
import jax.numpy as jnp

from .. import scaling
from ..formats import FP8_DTYPES
from . import _checks, _ffi
from ._implementation import by_platform
from ._reference import encode
from ._transforms import grouped, not_differentiable


def quantize_transpose(x, scale, dtype):
    """As `quantize`, and also the transpose: FP8 GEMMs on Hopper and Ada read both operands along the contracting dim.

    Equivalent to `data, amax = quantize(x, scale, dtype); data_t = data.T` with one read of `x`.

    Args:
        x: bfloat16, float16 or float32 `[m, n]`.
        scale: f32[] or f32[1]; multiplies.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        `(data, data_t, amax)`: data `[m, n]` and data_t `[n, m]` of `dtype`, amax f32[].

    Raises:
        TypeError: x, scale or dtype has another dtype; or the op is differentiated.
        ValueError: x is not of rank 2, or scale has another shape.
    """
    x = _checks.rank("quantize_transpose", "x", _checks.high_precision("quantize_transpose", "x", x), 2)
    scale = _checks.scale("quantize_transpose", "scale", scale)
    return _quantize_transpose(x, scale, _checks.dtype("quantize_transpose", "dtype", dtype, FP8_DTYPES))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _quantize_transpose(x, scale, dtype):
    @not_differentiable("quantize_transpose")
    def run(x, scale):
        data, data_t, amax = _groups(dtype)(x[None], scale)
        return data[0], data_t[0], amax.reshape(())

    return run(x, scale)


@functools.cache
def _groups(dtype):
    """Canonical form: x `[g, m, n]`, scale f32 `[1]` or `[g]` -> data `[g, m, n]`, data_t `[g, n, m]`, amax `[g]`."""

    def reference(x, scale):
        data = encode(x, scale[:, None, None], dtype)
        return data, data.swapaxes(1, 2), scaling.abs_max(x, axis=(1, 2))

    def custom_call(x, scale):
        g, m, n = x.shape
        results = [((g, m, n), dtype), ((g, n, m), dtype), ((g,), jnp.float32)]
        return tuple(_ffi.call("quantize_transpose", results, x, scale))

    return grouped(by_platform(reference, cpu=custom_call, cuda=custom_call))
