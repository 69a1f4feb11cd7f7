"""quantize_blocks_transpose: blocks with a scale each, in both layouts, in one read."""

import jax
from jax.typing import ArrayLike, DTypeLike

from . import _shapes
from ._quantize_blocks import block_op, checked, reference


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
    """Quantize the blocks of `x` and those of its transpose, for the product that contracts the other dimension.

    Equivalent to, with one read of `x` (two where blocks are whole rows):

        data, scale_inv = quantize_blocks(x, dtype, block=block, ...)
        data_t, scale_inv_t = quantize_blocks(x.mT, dtype, block=block, ...)

    In both layouts blocks lie along the last dimension, so data_t has other codes than data unless blocks are square.

    Args:
        x: bfloat16, float16 or float32 `[..., *m, *n]`.
        dtype: float8_e4m3fn or float8_e5m2.
        block, scale, rounding, power_2_scale: see `quantize_blocks`.
        rows, cols: the numbers of dimensions that m and n stand for. Blocks cut the merged matrix.

    Returns:
        `(data, scale_inv, data_t, scale_inv_t)`: data `[..., *m, *n]` and data_t `[..., *n, *m]` of `dtype`; scale_inv
        `[..., ceil(m / r), ceil(n / c)]` and scale_inv_t `[..., ceil(n / r), ceil(m / c)]`, float32 or float8_e8m0fnu.

    Raises:
        TypeError, ValueError: see `quantize_blocks`.
    """
    x, options = checked("quantize_blocks_transpose", x, dtype, block, scale, rounding, power_2_scale, rows, cols)
    data, scale_inv, data_t, scale_inv_t = _quantize_blocks_transpose(x, **options)
    return data, scale_inv, data_t, scale_inv_t


def _reference(x, vmap_dims, block, rows, cols, **static):
    static |= {"vmap_dims": vmap_dims, "rows": rows, "cols": cols}
    data, scale_inv = reference(x, block=block, **static)
    # Blocks of the transpose lie down the columns of x. Transpose codes and not x: they have half the bytes, or less.
    columnwise = (data, scale_inv) if block[0] == block[1] else reference(x, block=block[::-1], **static)
    return data, scale_inv, _shapes.transpose(columnwise[0], rows, cols), columnwise[1].mT


_quantize_blocks_transpose = block_op("quantize_blocks_transpose", _reference, transpose=True)
