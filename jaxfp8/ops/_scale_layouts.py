"""Scales of rows and blocks in the layouts that cuBLASLt reads, and the GPUs on which it multiplies them.

The layouts are those of cuda/kernels/scale_mode.h, on groups: a matrix `[g, rows, k]` with scales `[g, R, C]`. The
custom call that quantizes writes them, and `by_block` orders them by blocks; `to_stored` orders them again for the
custom call that multiplies. In a program with both and with sizes of whole tiles, XLA cancels the two reorderings.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _blocks, _shapes

# Blocks by their names in the attributes of custom calls.
NAMES = {(1, None): "rows", (1, 32): "1x32", (1, 128): "1x128", (128, 128): "128x128"}
# The pairs that cuBLASLt multiplies, by GPU: compute capability 9.0 alone, or from 10.0 on.
_ON_HOPPER = {("rows", "rows"), ("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")}
_ON_BLACKWELL = {("1x32", "1x32")}


def mode(block, dtype) -> str | None:
    """Return the name of cuBLASLt's mode for scales of these blocks; None where it has no mode."""
    is_e8m0 = np.dtype(dtype) == _blocks.E8M0
    return NAMES.get(block) if is_e8m0 == (block == (1, 32)) else None


def missing(modes, capabilities, power_2_scale: bool = False) -> str | None:
    """Return why cuBLASLt has no product of operands with these two modes on all of these GPUs; or None.

    Args:
        modes: the results of `mode` for a and b.
        capabilities: `(major, minor)` of the GPUs; if empty, GPUs that have the product are assumed.
        power_2_scale: whether all scales are powers of two.
    """
    # Blackwell has no product with float32 scales, but powers of two convert to E8M0 scales: see `as_mx`.
    if runs_as_mx(modes, capabilities, power_2_scale):
        return None
    hopper, blackwell = modes in _ON_HOPPER, modes in _ON_BLACKWELL
    if not (hopper or blackwell):
        return "cuBLASLt has no product of operands with these scales"
    # A program for GPUs of several kinds runs its kernel on all of them, or the reference on all of them.
    for capability in capabilities:
        if capability != (9, 0) if hopper else capability < (10, 0):
            have, need = ".".join(map(str, capability)), "9.0" if hopper else "10.0 or newer"
            scales = " by ".join(modes)
            reason = f"cuBLASLt multiplies scales of {scales} on compute capability {need}, this GPU has {have}"
            # One option of the recipe would give these GPUs an FP8 product, so the reason names it.
            as_mx = hopper and capability >= (10, 0) and not power_2_scale
            return reason + ", which multiplies those of a recipe with power_2_scale=True" * as_mx
    return None


def runs_as_mx(modes, capabilities, power_2_scale: bool) -> bool:
    """Return whether a product with float32 scales runs as a product with E8M0 scales on these GPUs; see `as_mx`."""
    return power_2_scale and modes in _ON_HOPPER and bool(capabilities) and min(capabilities) >= (10, 0)


def depth(mode: str) -> int:
    """Return the multiple to which k is padded, so that blocks along it are whole and rows are 16-byte pieces."""
    return {"rows": 16, "1x32": 32}.get(mode, 128)


def stored_shape(block, rows: int, k: int) -> tuple[int, ...]:
    """Return the shape of the scales of one matrix `[rows, k]` as custom calls write and read them.

    The scales lie in tiles of 128 by 128 elements. The part of a tile beyond the matrix has scales too.
    """
    row_tiles, tiles = -(-rows // 128), -(-k // 128)
    return {
        "rows": _blocks.count(block, rows, k),
        "1x32": (row_tiles, tiles, 512),
        "1x128": (tiles, rows),
        "128x128": (row_tiles, tiles + -tiles % 4),
    }[NAMES[block]]


def by_block(scales, block, rows: int, k: int):
    """Order scales `[g, *stored_shape]` as blocks, `[g, R, C]`; if nothing is cut off, XLA cancels `to_stored`."""
    if block == (1, 128):
        return jnp.swapaxes(scales, 1, 2)
    if block == (1, 32):
        # In a tile of 128 rows by 4 blocks, row r and block b are at [r % 32, r // 32, b].
        g, row_tiles, tiles, _ = scales.shape
        scales = scales.reshape(g, row_tiles, tiles, 32, 4, 4).transpose(0, 1, 4, 3, 2, 5)
        scales = scales.reshape(g, row_tiles * 128, tiles * 4)
    r, c = _blocks.count(block, rows, k)
    return scales[:, :r, :c]


def to_stored(scales, mode: str, rows: int):
    """Order scales `[g, R, C]` as custom calls read them; a matrix padded to `rows` has scales of 0 in the padding."""
    missing_rows = rows - scales.shape[1] if mode in ("rows", "1x128") else 0
    if mode == "rows":
        return _shapes.pad(scales[:, :, 0], missing_rows)
    # The scales of a block along k lie side by side, one for each row.
    if mode == "1x128":
        return jnp.swapaxes(_shapes.pad(scales, missing_rows, 0), 1, 2)
    if mode == "128x128":
        return _shapes.pad(scales, -scales.shape[2] % 4)
    # E8M0 has no zero to pad with, so its scales are padded and moved as bytes, in the order that `by_block` undoes.
    codes = lax.bitcast_convert_type(scales, jnp.uint8)
    codes = _shapes.pad(codes, -codes.shape[1] % 128, -codes.shape[2] % 4)
    g, m, n = codes.shape
    tiles = codes.reshape(g, m // 128, 4, 32, n // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    return tiles.reshape(g, m // 128, n // 4, 512)


def as_mx(scales, block, rows: int, k: int):
    """Convert scales of large blocks, powers of two, to E8M0 scales of blocks of 32, `[g, rows, ceil(k / 32)]`.

    Every block of 32 lies in one block of `block`, whose columns are a multiple of 32 or all of them, and takes its
    scale. The codes stay. The conversion is exact: an E8M0 code is the biased exponent of a float32, so a power of two
    from 2**-126 to 2**127 is the same number in both, and `quantize_blocks` makes no other scales. Its factor is
    `FP8_MAX / amax` rounded down to a power of two, at most 2**126, at least 2**-120 (the amax is below 2**128, FP8_MAX
    is 448 or more), and 1 where the amax is 0 or not finite; scales are the inverse. Any other float32 becomes NaN, so
    that a product of scales that are no powers of two is not silently wrong.
    """
    # One scale of a row now stands for 32 columns: `block` has c // 32 of them.
    r, c = block
    codes = _blocks.spread(_blocks.exponent_codes(scales), (r, None if c is None else c // 32), rows, -(-k // 32))
    return lax.bitcast_convert_type(codes, _blocks.E8M0)
