"""transpose_blocks: turn blocks along the rows of FP8 codes into blocks along the columns, without quantizing again."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..numerics import encode
from . import _blocks, _checks, _ffi, _shapes
from ._primitive import Op


def transpose_blocks(
    data: ArrayLike, scale_inv: ArrayLike, *, block: tuple[int, int], rows: int = 1, cols: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Transpose codes whose scales are powers of two, such that blocks lie along the rows again.

    The c rows of a new block cross one block each, and its scale is the largest of their scales:

        scale_inv_t[j, i] = max(scale_inv[i * c : (i + 1) * c, j // c])
        data_t[j, i] = round(data[i, j] * (scale_inv[i, j // c] / scale_inv_t[j, i // c]))

    The ratio is a power of two, at most 1. The product is rounded to the nearest FP8 number, ties to even: it is exact
    unless it is below the smallest normal number (2**-6 in E4M3, 2**-14 in E5M2), where it loses bits, down to a zero
    with the sign of the code. Codes of NaN and Inf stay. If a new block crosses a scale that is NaN or not a power of
    two, the scale and all codes of the new block are NaN, as `quantize_blocks` makes them.

    The result differs from `quantize_blocks(x.mT)` in three ways. A scale comes from all columns of an old block, and
    may be larger than the amax of its own column needs. A number is rounded twice if the product is subnormal; all
    other codes are those of x divided by the larger scale. A number that the first scale saturated stays saturated
    (with rounding="floor", or with float32 scales beside an Inf or NaN in the block).

    Args:
        data: float8_e4m3fn or float8_e5m2 `[..., *m, *n]`.
        scale_inv: float8_e8m0fnu, or float32 powers of two from 2**-126 to 2**127, `[..., m, ceil(n / c)]`: as
            `quantize_blocks` gives it with scale="e8m0" or power_2_scale=True.
        block: `(1, c)`, the block of data and of data_t. The last block of a row may be smaller.
        rows, cols: the numbers of dimensions that m and n stand for. Blocks cut the merged matrix.

    Returns:
        `(data_t, scale_inv_t)`: data_t `[..., *n, *m]` with the dtype of data; scale_inv_t `[..., n, ceil(m / c)]` with
        that of scale_inv.

    Raises:
        TypeError: data or scale_inv has another dtype, or the op is differentiated.
        ValueError: data has fewer dimensions than `rows + cols`, block is not `(1, c)`, or scale_inv has another shape.
    """
    op = "transpose_blocks"
    data = _checks.rank(op, "data", _checks.fp8(op, "data", data), rows + cols)
    block = _blocks.checked(op, "block", block)
    if block[0] != 1 or block[1] is None:
        raise ValueError(f"{op}: block: expected (1, columns), got {block}; transpose other blocks by quantizing again")
    leading, row, col = _shapes.parts(data.shape, rows, cols)
    scale_inv, _ = _blocks.checked_scale(op, "", scale_inv, block, leading, row, col)
    data_t, scale_inv_t = _transpose_blocks(data, scale_inv, block=block, rows=int(rows), cols=int(cols))
    return data_t, scale_inv_t


def _shift_down(data, shift):
    """Return the codes of `data / 2**shift`, for int32 shifts of at least 0; codes of NaN and Inf stay."""
    codes = lax.bitcast_convert_type(data, jnp.uint8)
    # A larger shift gives the same zeros, and its factor would not be a normal number.
    factor = _blocks.power_of_two(-jnp.minimum(shift, 64), False)
    shifted = lax.bitcast_convert_type(encode(data, factor, data.dtype), jnp.uint8)
    largest = int(np.array(jnp.finfo(data.dtype).max, data.dtype).view(np.uint8))
    return jnp.where(codes & 0x7F > largest, codes, shifted)


def _exponents(scales):
    """Return scales as E8M0 codes, uint8."""
    if scales.dtype == _blocks.E8M0:
        return lax.bitcast_convert_type(scales, jnp.uint8)
    return _blocks.exponent_codes(scales)


def _scales(codes, dtype):
    """Undo `_exponents`."""
    if dtype == _blocks.E8M0:
        return lax.bitcast_convert_type(codes, dtype)
    return _blocks.power_of_two(codes.astype(jnp.int32) - 127, codes == _blocks.NAN_CODE)


class _TransposeBlocks(Op):
    name = "transpose_blocks"

    def names(self, data, scale_inv, *, block, rows, cols):
        layouts = _blocks.layouts(data, rows, cols)
        return layouts[:2], layouts[2:]

    def sizes(self, data, scale_inv, *, block, rows, cols):
        return _blocks.sizes_of_layouts(data, block, rows, cols)

    def dtypes(self, data, scale_inv, **static):
        return [data.dtype, scale_inv.dtype]

    def reference(self, data, scale_inv, vmap_dims, block, rows, cols):
        """Transpose blocks in jnp."""
        first, size = data.ndim - rows - cols, block[1]
        matrix = _shapes.merge(data, *[1] * first, rows)
        m, n = matrix.shape[-2:]
        # 1. Find the scale of each new block; all columns of an old block have the same new scale.
        codes = _exponents(scale_inv).astype(jnp.int32)
        largest = jnp.max(_blocks.cut(codes, (size, 1)), axis=(-3, -1), initial=0)
        of_rows = _blocks.spread(largest, (size, 1), m, codes.shape[-1])
        # 2. Shift the codes of each old block, held as bytes: XLA's CPU compiler may move FP8 through float16.
        shift, of_elements = (_blocks.spread(x, block, m, n) for x in (of_rows - codes, of_rows))
        nan_code = 0x7F if jnp.finfo(data.dtype).nmant == 3 else 0x7E
        shifted = jnp.where(of_elements == _blocks.NAN_CODE, jnp.uint8(nan_code), _shift_down(matrix, shift))
        data_t = _shapes.transpose(shifted.reshape(data.shape), rows, cols)
        scales_t = _blocks.spread(largest.mT, (size, 1), n, largest.shape[-2])
        return lax.bitcast_convert_type(data_t, data.dtype), _scales(scales_t.astype(jnp.uint8), scale_inv.dtype)

    def cpu(self, data, scale_inv, vmap_dims, block, rows, cols):
        """Make one custom call on groups of matrices, with scales as E8M0 codes."""
        leading, row, col = _shapes.parts(data.shape, rows, cols)
        groups = _shapes.merge(data, len(leading), rows)
        g, m, n = groups.shape
        scales = _exponents(scale_inv).reshape(g, *scale_inv.shape[len(leading) :])
        results = [((g, n, m), data.dtype), ((g, n, -(-m // block[1])), jnp.uint8)]
        data_t, scales_t = _ffi.call("transpose_blocks", results, groups, scales, block=np.int64(block[1]))
        scales_t = _scales(scales_t.reshape(*leading, *scales_t.shape[1:]), scale_inv.dtype)
        return data_t.reshape(*leading, *col, *row), scales_t

    def align(self, axes, sizes, mesh_shape, *, block, rows, cols):
        return _blocks.aligned_layouts(axes, sizes, mesh_shape, block)


_transpose_blocks = _TransposeBlocks()
