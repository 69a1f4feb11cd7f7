"""Blocks of a matrix that have a scale each: how they cut the matrix, and the arithmetic of E8M0 scales.

A block `(r, c)` is r rows by c columns of a matrix `[..., m, n]`; None stands for all rows or all columns. The last
block of a dimension may be smaller. Scales are `[..., ceil(m / r), ceil(n / c)]`, float32 or float8_e8m0fnu.

An E8M0 code means `2**(code - 127)`, or NaN where it is 255. Code 0 is a subnormal float, which XLA's CPU threads read
as zero: codes are made and read as integers.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _checks, _shapes
from ._primitive import dims

E8M0 = np.dtype(jnp.float8_e8m0fnu)
NAN_CODE = 255
_BIAS = 127


def checked(op: str, name: str, block) -> tuple[int | None, int | None]:
    """Return a block as a tuple of Python integers of at least 1, or None."""
    is_pair = isinstance(block, (tuple, list)) and len(block) == 2
    if not is_pair or not all(b is None or (isinstance(b, (int, np.integer)) and b >= 1) for b in block):
        raise ValueError(f"{op}: {name}: expected (rows, columns), each a positive int, or None for all, got {block!r}")
    return tuple(None if b is None else int(b) for b in block)


def checked_scale(op: str, prefix: str, scale, block, leading, rows, cols):
    """Return the inverse scale of an operand `[*leading, *rows, *cols]`, one or one for each block, and the block.

    `prefix` is that of the arguments `scale_inv` and `block` in messages.
    """
    name = f"{prefix}scale_inv"
    if block is None:
        return _checks.scale(op, name, scale), None
    block, scale = checked(op, f"{prefix}block", block), _checks.array(op, name, scale)
    if scale.dtype not in (jnp.float32, E8M0):
        raise TypeError(f"{op}: {name}: expected float32 or float8_e8m0fnu, got {scale.dtype}; scales are not rounded")
    return _checks.shape(op, name, scale, (*leading, *count(block, math.prod(rows), math.prod(cols)))), block


def shape(block, m: int, n: int) -> tuple[int, int]:
    """Return the size of a block in a matrix `[m, n]`."""
    return tuple(max(size, 1) if b is None else b for b, size in zip(block, (m, n), strict=True))


def count(block, m: int, n: int) -> tuple[int, int]:
    """Return how many blocks a matrix `[m, n]` has along its rows and columns."""
    # No float arithmetic and no comparison by order: a size of a program to be exported may be symbolic.
    return tuple(int(size != 0) if b is None else -(-size // b) for b, size in zip(block, (m, n), strict=True))


def cut(x, block):
    """Cut `[..., m, n]` into `[..., R, r, C, c]`; zeros fill up the last block of a dimension."""
    *leading, m, n = x.shape
    (r, c), (rows, cols) = shape(block, m, n), count(block, m, n)
    # Zeros do not change the amax of a block, and `uncut` removes them.
    x = _shapes.pad(x, rows * r - m, cols * c - n)
    return x.reshape(*leading, rows, r, cols, c)


def uncut(x, m: int, n: int):
    """Undo `cut`."""
    *leading, rows, r, cols, c = x.shape
    return x.reshape(*leading, rows * r, cols * c)[..., :m, :n]


def spread(scales, block, m: int, n: int):
    """Repeat scales `[..., R, C]` for each element of a matrix `[m, n]`."""
    r, c = shape(block, m, n)
    *leading, rows, cols = scales.shape
    axes = (*range(len(leading)), len(leading), len(leading) + 2)
    return uncut(lax.broadcast_in_dim(scales, (*leading, rows, r, cols, c), axes), m, n)


def scaled(values, scales, block, m: int, n: int):
    """Multiply each value of matrices `[m, n]`, given in any shape, by the scale of its block, in the values' dtype."""
    for factor in e8m0_factors(scales, values.dtype) if scales.dtype == E8M0 else [scales.astype(values.dtype)]:
        values = values * spread(factor, block, m, n).reshape(values.shape)
    return values


def e8m0(exponent, is_nan):
    """Return the scales `2**exponent`, int32 in [-127, 127]; NaN where `is_nan`."""
    codes = jnp.where(is_nan, NAN_CODE, exponent + _BIAS)
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), E8M0)


def power_of_two(exponent, is_nan):
    """Return f32 `2**exponent` for an exponent in [-126, 127]; NaN where `is_nan`."""
    return lax.bitcast_convert_type(jnp.where(is_nan, 0x7FC00000, (exponent + _BIAS) << 23), jnp.float32)


def exponent_codes(scales):
    """Return the E8M0 codes of float32 scales that are powers of two from 2**-126 to 2**127, else NaN."""
    bits = lax.bitcast_convert_type(scales, jnp.uint32)
    exponent = bits >> 23
    # A power of two has no mantissa. Its exponent is neither 0 (zero, subnormals) nor 255 (Inf, NaN); the sign bit of a
    # negative number, which is shifted in with the exponent, makes it larger than 254.
    is_power = (bits & 0x7FFFFF == 0) & (exponent >= 1) & (exponent <= 254)
    return jnp.where(is_power, exponent, NAN_CODE).astype(jnp.uint8)


def e8m0_factors(scales, dtype):
    """Return two normal numbers of `dtype` whose product is the scale: each is about its square root."""
    codes = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    exponent, is_nan = codes - _BIAS, codes == NAN_CODE
    # A single factor is not enough: 2**-127 is subnormal, which XLA's CPU threads read as zero. Its parts, 2**-64 and
    # 2**-63, are normal.
    first = exponent >> 1
    return [power_of_two(part, is_nan).astype(dtype) for part in (first, exponent - first)]


def aligned(axes, sizes, mesh_shape, followers):
    """Cut scales as their blocks are cut: the `align` of an `Op` with scales of blocks.

    A matrix is cut over as many devices as have whole blocks: 28 blocks that come from 8 devices over 4 of them, in
    pairs that hold the same. Scales count merged dimensions, so only the first dimension is cut.

    Args:
        axes, sizes, mesh_shape: by the names of dimensions and of mesh axes, as `align` gets them.
        followers: for each kind of dimensions of a matrix, such as "row" of "row0" and "row1", the dimensions of scales
            that count its blocks, and the size of a block; None means one block, which has no cut. An op may lack some.
    """
    # 1. Forget how the scales are cut: they follow the matrix.
    counts = {name for sizes_of_blocks in followers.values() for name in sizes_of_blocks}
    axes = {name: entry for name, entry in axes.items() if name not in counts}
    for kind, sizes_of_blocks in followers.items():
        sizes_of_blocks = {name: b for name, b in sizes_of_blocks.items() if name in sizes}
        names = [name for name in dims(kind, len(sizes)) if name in sizes]
        # 2. Find the most devices of which each has whole blocks.
        size, entry = math.prod(sizes[name] for name in names), axes.get(names[0], ()) if names else ()
        while not all(b is None or _is_cut_into_whole(size, entry, mesh_shape, b) for b in sizes_of_blocks.values()):
            entry = entry[:-1]
        # 3. Cut the first dimension over these, and the scales with it.
        axes = {name: entry for name, entry in axes.items() if name not in names}
        if entry:
            axes |= {name: entry for name, b in sizes_of_blocks.items() if b is not None} | {names[0]: entry}
    return axes


def _is_cut_into_whole(size, entry, mesh_shape, block) -> bool:
    """Return whether each of these devices has whole blocks; one device has them."""
    return not entry or size // math.prod(mesh_shape[axis] for axis in entry) % block == 0


def layouts(rank, rows, cols) -> list[tuple[str, ...]]:
    """Return the names of the dimensions of codes, their scales, transposed codes and their scales."""
    # The transpose has other names for the numbers of blocks, which differ unless blocks are square.
    leading, row, col = dims("batch", rank - rows - cols), dims("row", rows), dims("col", cols)
    scales, scales_t = (*leading, "row_blocks", "col_blocks"), (*leading, "col_blocks_t", "row_blocks_t")
    return [leading + row + col, scales, leading + col + row, scales_t]


def sizes_of_layouts(codes, block, rows, cols) -> dict[str, int]:
    """Return the numbers of blocks, by the names of `layouts`: the `sizes` of an `Op`."""
    m, n = _shapes.merged(codes[len(codes) - rows - cols :], rows)
    names = "row_blocks", "col_blocks", "col_blocks_t", "row_blocks_t"
    return dict(zip(names, count(block, m, n) + count(block, n, m), strict=True))


def aligned_layouts(axes, sizes, mesh_shape, block):
    """Cut the scales of each layout together with its blocks: the `align` of an `Op`."""
    down, across = block
    rows, cols = {"row_blocks": down, "row_blocks_t": across}, {"col_blocks": across, "col_blocks_t": down}
    return aligned(axes, sizes, mesh_shape, {"row": rows, "col": cols})
