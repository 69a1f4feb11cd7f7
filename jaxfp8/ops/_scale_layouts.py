"""Scales of rows and blocks in the layouts that cuBLASLt reads, and which GPUs have it multiply them.

The layouts are those of cuda/kernels/scale_mode.h, on groups: a matrix `[g, rows, k]` with scales `[g, R, C]`.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _blocks, _shapes

# By block and dtype of the scales; the names are the attributes of the custom call.
_MODES = {
    ((1, None), np.dtype(np.float32)): "rows",
    ((1, 32), _blocks.E8M0): "1x32",
    ((1, 128), np.dtype(np.float32)): "1x128",
    ((128, 128), np.dtype(np.float32)): "128x128",
}
# What cuBLASLt multiplies, and where: compute capability 9.0 alone, or from 10.0 on.
_ON_HOPPER = {("rows", "rows"), ("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")}
_ON_BLACKWELL = {("1x32", "1x32")}


def mode(block, dtype) -> str | None:
    """The name of cuBLASLt's mode for scales of these blocks; None where it has none."""
    return _MODES.get((block, np.dtype(dtype)))


def missing(modes, capabilities) -> str | None:
    """Why cuBLASLt has no product of operands with these two modes on all of these GPUs; None where it has one.

    Args:
        modes: as `mode` gives them.
        capabilities: `(major, minor)` of GPUs. Where none are known, those that have it are assumed.
    """
    hopper, blackwell = modes in _ON_HOPPER, modes in _ON_BLACKWELL
    if not (hopper or blackwell):
        return "cuBLASLt has no product of operands that are scaled so"
    for capability in capabilities:
        if capability != (9, 0) if hopper else capability < (10, 0):
            have, need = ".".join(map(str, capability)), "9.0" if hopper else "10.0 or newer"
            return (
                f"cuBLASLt multiplies scales of {' by '.join(modes)} on compute capability {need}, this GPU has {have}"
            )
    return None


def depth(mode: str) -> int:
    """A multiple of which k is padded to, so that blocks along it are whole and rows are 16-byte pieces."""
    return {"rows": 16, "1x32": 32}.get(mode, 128)


def ordered(scales, mode: str, rows: int):
    """Scales `[g, R, C]` of a matrix that was padded to so many rows; the scales of what was added are 0."""
    missing_rows = rows - scales.shape[1] if mode in ("rows", "1x128") else 0
    if mode == "rows":
        return _shapes.pad(scales[:, :, 0], 0, missing_rows)
    if mode == "1x128":
        return jnp.swapaxes(_shapes.pad(scales, 0, missing_rows, 0), 1, 2)
    if mode == "128x128":
        return _shapes.pad(scales, 0, 0, -scales.shape[2] % 4)
    # Tiles of 128 rows by 4 blocks; in one, row r and block b are at [r % 32, r // 32, b].
    codes = lax.bitcast_convert_type(scales, jnp.uint8)
    codes = _shapes.pad(codes, 0, -codes.shape[1] % 128, -codes.shape[2] % 4)
    g, m, n = codes.shape
    tiles = codes.reshape(g, m // 128, 4, 32, n // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    return tiles.reshape(g, m // 128, n // 4, 512)
