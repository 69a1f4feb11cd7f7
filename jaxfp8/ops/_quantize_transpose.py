"""quantize_transpose: to FP8 in both layouts, and the amax, in one read."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..formats import FP8_DTYPES
from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op
from ._reference import encode

# The custom call gives a sum for each so many rows (common/column_sums.h); XLA adds them up.
_SUMMED_ROWS = 128


def quantize_transpose(x, scale, dtype, *, rows: int = 1, cols: int = 1, amax=None, column_sums: bool = False):
    """As `quantize`, and also the transpose: FP8 GEMMs on Hopper and Ada read both operands along the contracting dim.

    Equivalent to `data, amax = quantize(x, scale, dtype, amax=amax); data_t = data.mT` with one read of `x`.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`.
        scale: f32[] or f32[1]; multiplies.
        dtype: float8_e4m3fn or float8_e5m2.
        rows, cols: how many dimensions m and n stand for.
        amax: f32[] or f32[1], not negative: the amax so far, as for `quantize`.
        column_sums: also give `jnp.sum(x.astype(f32), axis=-2)`: the gradient of a bias, where x is that of an output.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` of `dtype`, amax f32[]. With `column_sums`
        also the sums, f32 `[..., n]`: a NaN or Inf as in any sum, the same bytes on every run of a program.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; column_sums is no bool; or the op is differentiated.
        ValueError: x has fewer dimensions than `rows + cols`, or scale or amax has another shape.
    """
    op = "quantize_transpose"
    x = _checks.rank(op, "x", _checks.high_precision(op, "x", x), rows + cols)
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    amax = _checks.amax_so_far(op, amax)
    if not isinstance(column_sums, (bool, np.bool_)):
        raise TypeError(f"{op}: column_sums: expected a bool, got {column_sums!r}")
    options = {"dtype": dtype, "rows": rows, "cols": cols, "column_sums": bool(column_sums)}
    data, data_t, amax, *sums = _quantize_transpose(x, scale, amax, **options)
    return data, data_t, amax.reshape(()), *sums


def _names(x, *rest, dtype, rows, cols, column_sums):
    del rest, dtype
    batch, rows, cols = dims("batch", x - rows - cols), dims("row", rows), dims("col", cols)
    results = [batch + rows + cols, batch + cols + rows, ONE, batch + cols]
    return [batch + rows + cols, ONE, ONE], results[: 3 + column_sums]


def _reference(x, scale, amax, members, dtype, rows, cols, column_sums):
    data = encode(x, _shapes.stretch(scale, x), dtype)
    first = x.ndim - rows - cols
    order = (*range(first), *range(first + rows, x.ndim), *range(first, first + rows))
    results = data, jnp.transpose(data, order), _shapes.raise_amax(amax, _shapes.abs_max(x, members))
    if not column_sums:
        return results
    return *results, jnp.sum(x, axis=tuple(range(first, first + rows)), dtype=jnp.float32)


def _custom_call(x, scale, amax, members, dtype, rows, cols, column_sums):
    first = x.ndim - rows - cols
    groups = _shapes.merge(x, first, rows)
    g, m, n = groups.shape
    batch = math.prod(x.shape[members:first])
    results = [((g, m, n), dtype), ((g, n, m), dtype), ((g,), jnp.float32)]
    if column_sums:
        results.append(((g, math.ceil(m / _SUMMED_ROWS), n), jnp.float32))
    operands = groups, _shapes.group_scales(scale, members, batch), _shapes.group_amaxes(amax, batch)
    data, data_t, top, *parts = _ffi.call("quantize_transpose", results, *operands, aliases={2: 2})
    top = _shapes.member_amaxes(top, x.shape[:members], batch) if batch else amax
    transposed = (*x.shape[:first], *x.shape[first + rows :], *x.shape[first : first + rows])
    sums = [jnp.sum(part, axis=1).reshape(*x.shape[:first], *x.shape[first + rows :]) for part in parts]
    return data.reshape(x.shape), data_t.reshape(transposed), top, *sums


_quantize_transpose = tensor_op(
    "quantize_transpose",
    names=_names,
    dtypes=lambda *_, dtype, column_sums, **__: [dtype, dtype, jnp.float32, jnp.float32][: 3 + column_sums],
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda column_sums, **_: [lax.pmax, lax.pmax, lax.pmax, lax.psum][: 3 + column_sums],
)
