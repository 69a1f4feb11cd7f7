"""quantize_transpose: to FP8 in both layouts, and the amax, in one read."""

import math

import jax.numpy as jnp

from .. import scaling
from ..formats import FP8_DTYPES
from . import _checks, _ffi
from ._primitive import grouped_op
from ._reference import encode


def quantize_transpose(x, scale, dtype):
    """As `quantize`, and also the transpose: FP8 GEMMs on Hopper and Ada read both operands along the contracting dim.

    Equivalent to `data, amax = quantize(x, scale, dtype); data_t = data.mT` with one read of `x`.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`.
        scale: f32[] or f32[1]; multiplies.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` of `dtype`, amax f32[].

    Raises:
        TypeError: x, scale or dtype has another dtype; or the op is differentiated.
        ValueError: x is not of rank 2 or more, or scale has another shape.
    """
    op = "quantize_transpose"
    x = _checks.matrices(op, "x", _checks.high_precision(op, "x", x))
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    *leading, m, n = x.shape
    data, data_t, amax = _groups(x.reshape(math.prod(leading), m, n), scale, dtype=dtype)
    amax = amax.reshape(()) if amax.shape == (1,) else scaling.abs_max(amax)
    return data.reshape(x.shape), data_t.reshape(*leading, n, m), amax


def _results(x, scale, dtype):
    del scale
    g, m, n = x.shape
    return [((g, m, n), dtype), ((g, n, m), dtype), ((g,), jnp.float32)]


def _reference(x, scale, dtype):
    data = encode(x, scale[:, None, None], dtype)
    return data, data.mT, scaling.abs_max(x, axis=(1, 2))


def _custom_call(x, scale, dtype):
    return _ffi.call("quantize_transpose", _results(x, scale, dtype), x, scale)


# x `[g, m, n]`, scale f32 `[1]` or `[g]` -> data `[g, m, n]`, data_t `[g, n, m]`, amax f32 `[g]`.
_groups = grouped_op(
    "quantize_transpose",
    results=_results,
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    is_scale=(False, True),
)
