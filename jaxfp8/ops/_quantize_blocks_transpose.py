"""quantize_blocks_transpose: blocks with a scale each, in both layouts, in one read."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _blocks, _shapes
from ._primitive import dims, tensor_op
from ._quantize_blocks import (
    align,
    checked,
    custom_call,
    has_custom_call,
    is_of_lines,
    not_on_meshes,
    on_cpu,
    reference,
    scale_dtype,
)


def quantize_blocks_transpose(
    x: ArrayLike,
    dtype: DTypeLike,
    *,
    block: tuple[int | None, int | None],
    scale: str = "f32",
    rounding: str = "ceil",
    power_2_scale: bool = False,
    rows: int = 1,
    cols: int = 1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `quantize_blocks`, and also of the transpose, for the product that contracts the other dimension.

    Equivalent to, with one read of `x` (two where blocks are whole rows):

        data, scale_inv = quantize_blocks(x, dtype, block=block, ...)
        data_t, scale_inv_t = quantize_blocks(x.mT, dtype, block=block, ...)

    Blocks of both lie along the last dimension: data_t has other codes than data, unless blocks are square.

    Args:
        x: bfloat16, float16 or float32 `[..., *m, *n]`.
        dtype: float8_e4m3fn or float8_e5m2.
        block, scale, rounding, power_2_scale: as of `quantize_blocks`.
        rows, cols: how many dimensions m and n stand for; blocks count them merged.

    Returns:
        `(data, scale_inv, data_t, scale_inv_t)`: data `[..., *m, *n]` and data_t `[..., *n, *m]` of `dtype`; scale_inv
        `[..., ceil(m / r), ceil(n / c)]` and scale_inv_t `[..., ceil(n / r), ceil(m / c)]`, float32 or float8_e8m0fnu.

    Raises:
        TypeError, ValueError: as of `quantize_blocks`.
    """
    x, options = checked("quantize_blocks_transpose", x, dtype, block, scale, rounding, power_2_scale, rows, cols)
    data, scale_inv, data_t, scale_inv_t = _quantize_blocks_transpose[is_of_lines(options["block"])](x, **options)
    return data, scale_inv, data_t, scale_inv_t


def _reference(x, members, block, rows, cols, quantize=reference, **static):
    static |= {"members": members, "rows": rows, "cols": cols}
    data, scale_inv = codes, scales = quantize(x, block=block, **static)
    if block[0] != block[1]:  # blocks down the columns: transposing codes moves half the bytes that x has, or less
        codes, scales = quantize(x, block=block[::-1], **static)
    first = x.ndim - rows - cols
    order = (*range(first), *range(first + rows, x.ndim), *range(first, first + rows))
    return data, scale_inv, jnp.transpose(codes, order), scales.mT


def _on_cpu(x, **static):
    return _reference(x, quantize=on_cpu, **static)


def _cuda(x, members, **static):
    if not has_custom_call(static["block"]):
        return _reference(x, members, **static)
    return custom_call(x, transpose=True, **static)


def _names(x, *, rows, cols, **_):
    leading, row, col = dims("batch", x - rows - cols), dims("row", rows), dims("col", cols)
    scales = (*leading, "row_blocks", "col_blocks"), (*leading, "col_blocks_t", "row_blocks_t")
    return [leading + row + col], [leading + row + col, scales[0], leading + col + row, scales[1]]


def _sizes(x, *, block, rows, cols, **_):
    m, n = _shapes.merged(x[len(x) - rows - cols :], rows)
    names = "row_blocks", "col_blocks", "col_blocks_t", "row_blocks_t"
    return dict(zip(names, _blocks.count(block, m, n) + _blocks.count(block, n, m), strict=True))


def variant(of_lines: bool, cpu=None):
    """The op for blocks that are whole lines, or for others; `cpu` is a custom call, where there is one."""
    return tensor_op(
        "quantize_blocks_transpose",
        names=_names,
        sizes=_sizes,
        dtypes=lambda _, *, dtype, scale, **__: [dtype, scale_dtype(scale)] * 2,
        reference=_reference,
        cpu=cpu or _on_cpu,
        cuda=_cuda,
        combine=lambda **_: lax.psum,  # of nothing: `align` cuts scales with their blocks
        on_one_device_only=not_on_meshes(of_lines, cpu is not None),
        align=align,
    )


_quantize_blocks_transpose = [variant(of_lines) for of_lines in (False, True)]
