"""quantize: to FP8 with a given scale, and the amax, in one read."""

import jax.numpy as jnp
from jax import lax

from ..formats import FP8_DTYPES
from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op
from ._reference import encode


def quantize(x, scale, dtype, *, amax=None):
    """Quantizes `x` and raises an amax to that of `x`, with one read of `x`.

    Equivalent to, with `y = x.astype(f32) * scale`:

        data = jnp.clip(y, -FP8_MAX, FP8_MAX).astype(dtype)        # NaN where x is not finite
        amax = jnp.maximum(amax, jnp.max(jnp.abs(x)))              # as ops.amax

    One multiplication in f32, one rounding to nearest even. Finite values saturate at FP8_MAX (448 for float8_e4m3fn,
    57344 for float8_e5m2), also when the product overflows; an Inf or NaN in `x` gives a NaN code in both formats.

    Args:
        x: bfloat16, float16 or float32, any shape.
        scale: f32[] or f32[1]; multiplies.
        dtype: float8_e4m3fn or float8_e5m2.
        amax: f32[] or f32[1], not negative: the amax so far; 0 where it is left out. It is raised in place, so that a
            zero out of another op (`ops.delayed_scales` gives one) makes this a single launch on a GPU.

    Returns:
        `(data, amax)`: data of `dtype` with the shape of x, amax f32[].

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; or the op is differentiated.
        ValueError: scale or amax has another shape.
    """
    x = _checks.high_precision("quantize", "x", x)
    scale = _checks.scale("quantize", "scale", scale)
    dtype = _checks.dtype("quantize", "dtype", dtype, FP8_DTYPES)
    data, amax = _quantize(x, scale, _checks.amax_so_far("quantize", amax), dtype=dtype)
    return data, amax.reshape(())


def _reference(x, scale, amax, members, dtype):
    return encode(x, _shapes.stretch(scale, x), dtype), _shapes.raise_amax(amax, _shapes.abs_max(x, members))


def _custom_call(x, scale, amax, members, dtype):
    groups = _shapes.merge(x, members)
    results = [(groups.shape, dtype), (groups.shape[:1], jnp.float32)]
    operands = groups, _shapes.group_scales(scale, members), amax.reshape(-1)
    data, top = _ffi.call("quantize", results, *operands, aliases={2: 1})
    return data.reshape(x.shape), _shapes.member_amaxes(top, x.shape[:members])


_quantize = tensor_op(
    "quantize",
    names=lambda x, *_, dtype: ([dims("x", x), ONE, ONE], [dims("x", x), ONE]),
    dtypes=lambda *_, dtype: [dtype, jnp.float32],
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda **_: lax.pmax,
)
