"""quantize_transpose: to FP8 in both layouts, and the amax, in one read."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..formats import FP8_DTYPES
from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op
from ._quantize import COUNTED_SIZES, COUNTS, counted
from ._reference import count, encode

# The custom call gives a sum for each so many rows (common/column_sums.h); XLA adds them up.
_SUMMED_ROWS = 128


def quantize_transpose(
    x: ArrayLike,
    scale: ArrayLike,
    dtype: DTypeLike,
    *,
    rows: int = 1,
    cols: int = 1,
    amax: ArrayLike | None = None,
    column_sums: bool = False,
    counts: bool = False,
) -> tuple[jax.Array, ...]:
    """As `quantize`, and also the transpose: FP8 GEMMs on Hopper and Ada read both operands along the contracting dim.

    Equivalent to `data, amax = quantize(x, scale, dtype, amax=amax); data_t = data.mT` with one read of `x`.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`.
        scale: f32[] or f32[1]; multiplies.
        dtype: float8_e4m3fn or float8_e5m2.
        rows, cols: how many dimensions m and n stand for.
        amax: f32[] or f32[1], not negative: the amax so far, as for `quantize`.
        column_sums: also give `jnp.sum(x.astype(f32), axis=-2)`: the gradient of a bias, where x is that of an output.
        counts: also count elements that saturate or become zero, as `quantize` does.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` of `dtype`, amax f32[]. With `column_sums`
        also the sums, f32 `[..., n]`: a NaN or Inf as in any sum, the same bytes on every run of a program. With
        `counts` these at last, f32 `[2]`.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; column_sums or counts is no bool; or the op is
            differentiated.
        ValueError: x has fewer dimensions than `rows + cols`, or scale or amax has another shape.
    """
    op = "quantize_transpose"
    x = _checks.rank(op, "x", _checks.high_precision(op, "x", x), rows + cols)
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    amax = _checks.amax_so_far(op, amax)
    column_sums = _checks.flag(op, "column_sums", column_sums)
    options = {"dtype": dtype, "rows": rows, "cols": cols, "column_sums": column_sums} | counted(op, counts)
    data, data_t, amax, *more = _quantize_transpose(x, scale, amax, **options)
    return data, data_t, amax.reshape(()), *more


def _names(x, *rest, dtype, rows, cols, column_sums, counts=False):
    del rest, dtype
    batch, rows, cols = dims("batch", x - rows - cols), dims("row", rows), dims("col", cols)
    results = [batch + rows + cols, batch + cols + rows, ONE, *[batch + cols] * column_sums, *[COUNTS] * counts]
    return [batch + rows + cols, ONE, ONE], results


def _reference(x, scale, amax, members, dtype, rows, cols, column_sums, counts=False):
    stretched = _shapes.stretch(scale, x)
    data = encode(x, stretched, dtype)
    first = x.ndim - rows - cols
    order = (*range(first), *range(first + rows, x.ndim), *range(first, first + rows))
    results = data, jnp.transpose(data, order), _shapes.raise_amax(amax, _shapes.abs_max(x, members))
    if column_sums:
        results += (jnp.sum(x, axis=tuple(range(first, first + rows)), dtype=jnp.float32),)
    return (*results, count(x, stretched, dtype, tuple(range(members, x.ndim)))) if counts else results


def _custom_call(x, scale, amax, members, dtype, rows, cols, column_sums, counts=False):
    first = x.ndim - rows - cols
    groups = _shapes.merge(x, first, rows)
    g, m, n = groups.shape
    batch = math.prod(x.shape[members:first])
    results = [((g, m, n), dtype), ((g, n, m), dtype), ((g,), jnp.float32)]
    name = "quantize_transpose"
    if counts:
        name = "quantize_transpose_counted"
        results.append(((g, 4), jnp.uint32))
    if column_sums:
        results.append(((g, math.ceil(m / _SUMMED_ROWS), n), jnp.float32))
    operands = groups, _shapes.group_scales(scale, members, batch), _shapes.group_amaxes(amax, batch)
    data, data_t, top, *more = _ffi.call(name, results, *operands, aliases={2: 2})
    words, parts = more[:counts], more[counts:]
    top = _shapes.member_amaxes(top, x.shape[:members], batch) if batch else amax
    transposed = (*x.shape[:first], *x.shape[first + rows :], *x.shape[first : first + rows])
    sums = [jnp.sum(part, axis=1).reshape(*x.shape[:first], *x.shape[first + rows :]) for part in parts]
    words = [_shapes.member_counts(of, x.shape[:members], batch) for of in words]
    return data.reshape(x.shape), data_t.reshape(transposed), top, *sums, *words


_quantize_transpose = tensor_op(
    "quantize_transpose",
    names=_names,
    dtypes=lambda *_, dtype, column_sums, counts=False, **__: (
        [dtype, dtype] + [jnp.float32] * (1 + column_sums + counts)
    ),
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda column_sums, counts=False, **_: [lax.pmax] * 3 + [lax.psum] * (column_sums + counts),
    sizes=lambda *_, **__: COUNTED_SIZES,
)
