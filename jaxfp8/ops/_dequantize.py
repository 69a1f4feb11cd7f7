"""dequantize: from FP8, times the inverse scale."""

from . import _checks, _ffi
from ._primitive import grouped_op
from ._reference import decode


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
    dtype = _checks.dtype("dequantize", "dtype", dtype, _checks.HIGH_PRECISION)
    return dequantize_groups(data.reshape(1, -1), scale_inv, dtype=dtype)[0].reshape(data.shape)


def _results(data, scale_inv, dtype):
    del scale_inv
    return [(data.shape, dtype)]


def _reference(data, scale_inv, dtype):
    return (decode(data, scale_inv.reshape(-1, *[1] * (data.ndim - 1)), dtype),)


def _custom_call(data, scale_inv, dtype):
    return _ffi.call("dequantize", _results(data, scale_inv, dtype), data, scale_inv)


# data `[g, ...]`, scale_inv f32 `[1]` or `[g]` -> `[g, ...]` of `dtype`.
dequantize_groups = grouped_op(
    "dequantize", results=_results, reference=_reference, cpu=_custom_call, cuda=_custom_call, is_scale=(False, True)
)
