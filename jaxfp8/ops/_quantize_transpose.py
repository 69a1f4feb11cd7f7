"""quantize_transpose: FP8 codes in both layouts, and the amax, in one read."""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES
from . import _checks, _shapes
from ._primitive import ONE, dims, tensor_op
from ._quantize import call, reference

# The custom call gives a sum for each run of this many rows (common/column_sums.h); XLA adds the sums up.
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
) -> tuple[jax.Array, ...]:
    """Quantize `x` in both layouts: FP8 GEMMs on Hopper and Ada read both operands along the contraction.

    Equivalent to `data, amax = quantize(x, scale, dtype, amax=amax); data_t = data.mT` with one read of `x`.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`.
        scale: f32[] or f32[1], the factor of x.
        dtype: float8_e4m3fn or float8_e5m2.
        rows, cols: the numbers of dimensions that m and n stand for.
        amax: f32[] or f32[1], not negative: the amax so far, as for `quantize`.
        column_sums: whether to return `jnp.sum(x.astype(f32), axis=-2)` too: the gradient of a bias, if x is the
            gradient of an output.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` of `dtype`, amax f32[]. With `column_sums`
        also the sums, f32 `[..., n]`, which a NaN or Inf enters as any sum; every run gives the same bytes.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; column_sums is no bool; or the op is differentiated.
        ValueError: x has fewer dimensions than `rows + cols`, or scale or amax has another shape.
    """
    options = {"rows": rows, "cols": cols, "column_sums": column_sums}
    data, data_t, amax, *sums = quantize_transpose_with(x, scale, dtype, amax=amax, with_amax=True, **options)
    return data, data_t, amax.reshape(()), *sums


def quantize_transpose_with(x, scale, dtype, *, rows, cols, amax, with_amax, column_sums):
    """Quantize as `quantize_transpose` does, with the amax as f32[1]; None without `with_amax`."""
    op = "quantize_transpose"
    x = _checks.rank(op, "x", _checks.high_precision(op, "x", x), rows + cols)
    operands = _checks.quantizer_operands(op, scale, amax)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    column_sums = _checks.flag(op, "column_sums", column_sums)
    options = {"dtype": dtype, "rows": rows, "cols": cols, "with_amax": with_amax, "column_sums": column_sums}
    data, data_t, *more = _quantize_transpose(x, *operands, **options)
    amax = more.pop(0) if with_amax else None
    return data, data_t, amax, *more


def _names(x, *scalars, rows, cols, with_amax, column_sums, dtype):
    del dtype
    batch, rows, cols = dims("batch", x - rows - cols), dims("row", rows), dims("col", cols)
    # The sums lack the rows, so a mesh that cuts rows adds up the sums of its devices.
    results = [batch + rows + cols, batch + cols + rows, *[ONE] * with_amax, *[batch + cols] * column_sums]
    return [batch + rows + cols, *[ONE] * len(scalars)], results


def _reference(x, *scalars, rows, cols, column_sums, **options):
    results = reference(x, *scalars, rows=rows, cols=cols, **options)
    if column_sums:
        first = x.ndim - rows - cols
        results.append(jnp.sum(x, axis=tuple(range(first, first + rows)), dtype=jnp.float32))
    return results


def sums_type(g, m, n):
    """Return `(shape, dtype)` of the sums of columns that a custom call gives."""
    return (g, -(-m // _SUMMED_ROWS), n), jnp.float32


def custom_call(x, scale, *amax_so_far, vmap_dims, dtype, rows, cols, with_amax, column_sums):
    """Quantize `x` in both layouts by one custom call: `[data, data_t, amax, sums]`."""
    leading, row, col = _shapes.parts(x.shape, rows, cols)
    groups, batch = _shapes.merge(x, len(leading), rows), math.prod(leading[vmap_dims:])
    g, m, n = groups.shape
    options = {"vmapped": leading[:vmap_dims], "with_amax": with_amax, "batch": batch}
    options |= {"data": [((g, m, n), dtype), ((g, n, m), dtype)], "after": [sums_type(g, m, n)] * column_sums}
    (data, data_t), amax, sums = call("quantize_transpose", groups, scale, amax_so_far, **options)
    if with_amax and amax_so_far and not batch:  # without groups no amax was raised
        amax = amax_so_far
    sums = [jnp.sum(part, axis=1).reshape(*leading, *col) for part in sums]
    return [data.reshape(x.shape), data_t.reshape(*leading, *col, *row), *amax, *sums]


_quantize_transpose = tensor_op(
    "quantize_transpose",
    names=_names,
    dtypes=lambda *_, dtype, with_amax, column_sums, **__: [dtype, dtype, *[jnp.float32] * (with_amax + column_sums)],
    reference=_reference,
    cpu=custom_call,
)
