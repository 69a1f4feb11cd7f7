"""quantize_transpose: to FP8 in both layouts, and the amax, in one read."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES, encode
from . import _checks, _ffi, _shapes
from ._primitive import ONE, dims, tensor_op

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

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` of `dtype`, amax f32[]. With `column_sums`
        also the sums, f32 `[..., n]`: a NaN or Inf as in any sum, the same bytes on every run of a program.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; column_sums is no bool; or the op is differentiated.
        ValueError: x has fewer dimensions than `rows + cols`, or scale or amax has another shape.
    """
    options = {"rows": rows, "cols": cols, "column_sums": column_sums}
    return quantize_transpose_with(x, scale, dtype, amax=amax, with_amax=True, **options)


def quantize_transpose_with(x, scale, dtype, *, rows, cols, amax, with_amax, column_sums):
    """`quantize_transpose`, with None in place of the amax unless `with_amax`."""
    op = "quantize_transpose"
    x = _checks.rank(op, "x", _checks.high_precision(op, "x", x), rows + cols)
    scale = _checks.scale(op, "scale", scale)
    dtype = _checks.dtype(op, "dtype", dtype, FP8_DTYPES)
    so_far = [] if amax is None else [_checks.scale(op, "amax", amax)]
    column_sums = _checks.flag(op, "column_sums", column_sums)
    options = {"dtype": dtype, "rows": rows, "cols": cols, "with_amax": with_amax, "column_sums": column_sums}
    data, data_t, *more = _quantize_transpose(x, scale, *so_far, **options)
    top = more.pop(0).reshape(()) if with_amax else None
    return data, data_t, top, *more


def _names(x, *scalars, rows, cols, with_amax, column_sums, dtype):
    del dtype
    batch, rows, cols = dims("batch", x - rows - cols), dims("row", rows), dims("col", cols)
    results = [batch + rows + cols, batch + cols + rows, *[ONE] * with_amax, *[batch + cols] * column_sums]
    return [batch + rows + cols, *[ONE] * len(scalars)], results


def _reference(x, scale, *so_far, members, dtype, rows, cols, with_amax, column_sums):
    data = encode(x, _shapes.stretch(scale, x), dtype)
    first = x.ndim - rows - cols
    order = (*range(first), *range(first + rows, x.ndim), *range(first, first + rows))
    results = [data, jnp.transpose(data, order)]
    if with_amax:
        results.append(_shapes.raise_amax(_shapes.abs_max(x, members), *so_far))
    if column_sums:
        results.append(jnp.sum(x, axis=tuple(range(first, first + rows)), dtype=jnp.float32))
    return results


def _custom_call(x, scale, *so_far, members, dtype, rows, cols, with_amax, column_sums):
    first = x.ndim - rows - cols
    groups = _shapes.merge(x, first, rows)
    g, m, n = groups.shape
    batch = math.prod(x.shape[members:first])
    operand, result = _shapes.amax_buffers(so_far, with_amax, g, batch)
    results = [((g, m, n), dtype), ((g, n, m), dtype), result]
    if column_sums:
        results.append(((g, math.ceil(m / _SUMMED_ROWS), n), jnp.float32))
    operands = groups, _shapes.group_scales(scale, members, batch), operand
    aliases = {2: 2} if so_far else None
    data, data_t, top, *parts = _ffi.call("quantize_transpose", results, *operands, aliases=aliases)
    transposed = (*x.shape[:first], *x.shape[first + rows :], *x.shape[first : first + rows])
    outputs = [data.reshape(x.shape), data_t.reshape(transposed)]
    if with_amax:  # members without groups keep theirs
        outputs.append(so_far[0] if so_far and not batch else _shapes.member_amaxes(top, x.shape[:members], batch))
    sums = [jnp.sum(part, axis=1).reshape(*x.shape[:first], *x.shape[first + rows :]) for part in parts]
    return outputs + sums


_quantize_transpose = tensor_op(
    "quantize_transpose",
    names=_names,
    dtypes=lambda *_, dtype, with_amax, column_sums, **__: [dtype, dtype, *[jnp.float32] * (with_amax + column_sums)],
    reference=_reference,
    cpu=_custom_call,
    cuda=_custom_call,
    combine=lambda with_amax, column_sums, **_: [lax.pmax] * (2 + with_amax) + [lax.psum] * column_sums,
)
