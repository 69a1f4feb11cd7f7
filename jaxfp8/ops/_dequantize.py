"""dequantize: from FP8, times the inverse scale."""

import functools

import jax

from . import _checks, _ffi
from ._implementation import by_platform
from ._reference import decode
from ._transforms import grouped, not_differentiable


def dequantize(data, scale_inv, dtype):
    """Values of FP8 codes.

    Equivalent to `(data.astype(f32) * scale_inv).astype(dtype)`: one multiplication in f32, one rounding.

    Args:
        data: float8_e4m3fn or float8_e5m2, any shape.
        scale_inv: f32[] or f32[1]; multiplies.
        dtype: bfloat16, float16 or float32.

    Returns:
        An array of `dtype` with the shape of `data`.

    Raises:
        TypeError: data, scale_inv or dtype has another dtype; or the op is differentiated.
        ValueError: scale_inv has another shape.
    """
    data = _checks.fp8("dequantize", "data", data)
    scale_inv = _checks.scale("dequantize", "scale_inv", scale_inv)
    return _dequantize(data, scale_inv, _checks.dtype("dequantize", "dtype", dtype, _checks.HIGH_PRECISION))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _dequantize(data, scale_inv, dtype):
    @not_differentiable("dequantize")
    def run(data, scale_inv):
        return _groups(dtype)(data.reshape(1, -1), scale_inv).reshape(data.shape)

    return run(data, scale_inv)


@functools.cache
def _groups(dtype):
    """Canonical form: data `[g, n]`, scale_inv f32 `[1]` or `[g]` -> `[g, n]` of `dtype`."""

    def reference(data, scale_inv):
        return decode(data, scale_inv[:, None], dtype)

    def custom_call(data, scale_inv):
        return _ffi.call("dequantize", [(data.shape, dtype)], data, scale_inv)[0]

    return grouped(by_platform(reference, cpu=custom_call, cuda=custom_call))
