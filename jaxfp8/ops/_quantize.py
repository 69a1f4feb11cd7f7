"""quantize: to FP8 with a given scale, and the amax, in one read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES, encode
from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op


def quantize(
    x: ArrayLike, scale: ArrayLike, dtype: DTypeLike, *, amax: ArrayLike | None = None
) -> tuple[jax.Array, jax.Array]:
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
    return quantize_with(x, scale, dtype, amax=amax, with_amax=True)


def quantize_with(x, scale, dtype, *, amax, with_amax):
    """`quantize`, with None in place of the amax unless `with_amax`: nothing then runs before or after the kernel."""
    x = _checks.high_precision("quantize", "x", x)
    scale = _checks.scale("quantize", "scale", scale)
    dtype = _checks.dtype("quantize", "dtype", dtype, FP8_DTYPES)
    so_far = [] if amax is None else [_checks.scale("quantize", "amax", amax)]
    data, *top = _quantize(x, scale, *so_far, dtype=dtype, with_amax=with_amax)
    return data, top[0].reshape(()) if with_amax else None


def _reference(x, scale, *so_far, members, dtype, with_amax):
    data = encode(x, _shapes.stretch(scale, x), dtype)
    return (data, _shapes.raise_amax(_shapes.abs_max(x, members), *so_far)) if with_amax else (data,)


def _custom_call(x, scale, *so_far, members, dtype, with_amax):
    groups = _shapes.merge(x, members)
    operand, result = _shapes.amax_buffers(so_far, with_amax, groups.shape[0])
    operands = groups, _shapes.group_scales(scale, members), operand
    aliases = {2: 1} if so_far else None
    data, top = _ffi.call("quantize", [(groups.shape, dtype), result], *operands, aliases=aliases)
    data = data.reshape(x.shape)
    return (data, _shapes.member_amaxes(top, x.shape[:members])) if with_amax else (data,)


_quantize = tensor_op(
    "quantize",
    names=lambda x, *scalars, dtype, with_amax: (
        [dims("x", x), *[ONE] * len(scalars)],
        [dims("x", x), *[ONE] * with_amax],
    ),
    dtypes=lambda *_, dtype, with_amax: [dtype, *[jnp.float32] * with_amax],
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda **_: lax.pmax,
)
