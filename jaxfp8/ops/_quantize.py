"""quantize: to FP8 with a given scale, and the amax, in one read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..formats import FP8_DTYPES
from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op
from ._reference import count, encode

# What counts add to an op: dimensions that no mesh cuts, their size, and their sum over shards.
COUNTS = dims("whole_count", 1)
COUNTED_SIZES = {COUNTS[0]: 2}


def quantize(
    x: ArrayLike, scale: ArrayLike, dtype: DTypeLike, *, amax: ArrayLike | None = None, counts: bool = False
) -> tuple[jax.Array, ...]:
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
        counts: also count, in the same read of x, the elements with `abs(y) > FP8_MAX`, which saturate (an Inf is one,
            a NaN is none), and those that are not zero and become zero. On a GPU one launch more, of a memset.

    Returns:
        `(data, amax)`: data of `dtype` with the shape of x, amax f32[]. With `counts` also these, f32 `[2]`: whole
        numbers, exact up to 2**24.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; counts is no bool; or the op is differentiated.
        ValueError: scale or amax has another shape.
    """
    x = _checks.high_precision("quantize", "x", x)
    scale = _checks.scale("quantize", "scale", scale)
    dtype = _checks.dtype("quantize", "dtype", dtype, FP8_DTYPES)
    amax = _checks.amax_so_far("quantize", amax)
    options = {"dtype": dtype} | counted("quantize", counts)
    data, amax, *more = _quantize(x, scale, amax, **options)
    return data, amax.reshape(()), *more


def counted(op, counts) -> dict:
    """The argument `counts` as an option of a primitive: absent without, so that programs are what they were."""
    return {"counts": True} if _checks.flag(op, "counts", counts) else {}


def _reference(x, scale, amax, members, dtype, counts=False):
    stretched = _shapes.stretch(scale, x)
    results = encode(x, stretched, dtype), _shapes.raise_amax(amax, _shapes.abs_max(x, members))
    return (*results, count(x, stretched, dtype, tuple(range(members, x.ndim)))) if counts else results


def _custom_call(x, scale, amax, members, dtype, counts=False):
    groups = _shapes.merge(x, members)
    results = [(groups.shape, dtype), (groups.shape[:1], jnp.float32)]
    operands = groups, _shapes.group_scales(scale, members), amax.reshape(-1)
    name = "quantize"
    if counts:
        name = "quantize_counted"
        results.append(((groups.shape[0], 4), jnp.uint32))
    data, top, *words = _ffi.call(name, results, *operands, aliases={2: 1})
    more = [_shapes.member_counts(of, x.shape[:members]) for of in words]
    return data.reshape(x.shape), _shapes.member_amaxes(top, x.shape[:members]), *more


_quantize = tensor_op(
    "quantize",
    names=lambda x, *_, dtype, counts=False: (
        [dims("x", x), ONE, ONE],
        [dims("x", x), ONE, COUNTS][: 2 + counts],
    ),
    dtypes=lambda *_, dtype, counts=False: [dtype, jnp.float32, jnp.float32][: 2 + counts],
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda counts=False, **_: [lax.pmax, lax.pmax, lax.psum][: 2 + counts],
    sizes=lambda *_, **__: COUNTED_SIZES,
)
