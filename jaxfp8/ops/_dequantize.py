"""dequantize: the values of FP8 codes, times scale_inv."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..numerics import decode
from . import _checks, _disabled, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op


def dequantize(data: ArrayLike, scale_inv: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Compute the values of FP8 codes.

    Equivalent to `(data.astype(f32) * scale_inv).astype(dtype)`. A NaN result is the quiet NaN without sign.

    Args:
        data: float8_e4m3fn or float8_e5m2, any shape.
        scale_inv: f32[] or f32[1], the factor of the codes.
        dtype: bfloat16, float16 or float32.

    Returns:
        An array of `dtype` with the shape of `data`.

    Raises:
        TypeError: data, scale_inv or dtype has another dtype; or the op is differentiated.
        ValueError: scale_inv has another shape.
    """
    data = _checks.fp8("dequantize", "data", data)
    scale_inv = _checks.scale("dequantize", "scale_inv", scale_inv)
    dtype = _checks.dtype("dequantize", "dtype", dtype, _checks.HIGH_PRECISION)
    return _dequantize(data, scale_inv, dtype=dtype)[0]


def _reference(data, scale_inv, vmap_dims, dtype):
    return (decode(data, _shapes.stretch(scale_inv, data), dtype),)


def _custom_call(data, scale_inv, vmap_dims, dtype):
    # Without vmapped dimensions one scale serves all groups, so the first dimension may count as groups.
    groups = _shapes.merge(data, vmap_dims) if vmap_dims or data.ndim < 2 else data
    (out,) = _ffi.call("dequantize", [(groups.shape, dtype)], groups, _shapes.group_scales(scale_inv, vmap_dims))
    return (out.reshape(data.shape),)


_RULES = {
    "names": lambda data, _, dtype: ([dims("x", data), ONE], [dims("x", data)]),
    "dtypes": lambda data, _, dtype: [dtype],
}
_dequantize = tensor_op("dequantize", _reference, _custom_call, **_RULES)


def widening_on_cpu():
    """Return a conversion of codes to bfloat16 by one custom call, for the programs of other ops on CPUs.

    bfloat16 has half of f32's bytes, and newer processors multiply it natively.
    """
    dtype = np.dtype(jnp.bfloat16)
    if _disabled.reason("dequantize"):
        return lambda data: data.astype(dtype)
    unit = jax.lax.full((1,), 1.0, np.float32)
    return lambda data: _custom_call(data, unit, 0, dtype)[0]
