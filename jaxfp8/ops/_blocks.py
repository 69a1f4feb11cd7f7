"""Blocks of a matrix that have a scale each: how they cut the matrix, and the
arithmetic of E8M0 scales.

A block `(r, c)` is r rows by c columns of a matrix `[..., m, n]`; None stands for all
rows or all columns. The last block of a dimension may be smaller. Scales are
`[..., ceil(m / r), ceil(n / c)]`, float32 or float8_e8m0fnu.

An E8M0 code means `2**(code - 127)`, or NaN where it is 255. Code 0 is a subnormal
float, which XLA's CPU threads read as zero: codes are made and read as integers.

cuBLASLt reads scales in the layouts of cuda/kernels/scale_mode.h, on groups: a matrix
`[g, rows, k]` with scales `[g, R, C]`. The custom call that quantizes writes them, and
`by_block` orders them by blocks; `to_stored` orders them again for the custom call that
multiplies. In a program with both and with sizes of whole tiles, XLA cancels the two
reorderings.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import _scaling, fp8_max
from . import _checks, _shapes
from ._partition import ONE, blocks_of

E8M0 = np.dtype(jnp.float8_e8m0fnu)
_NAN_CODE = 255
_BIAS = 127
_EXPONENT_BITS = 0x7F800000
_MANTISSA_BITS = 0x007FFFFF
# Blocks by their names in the attributes of custom calls.
NAMES = {(1, None): "rows", (1, 32): "1x32", (1, 128): "1x128", (128, 128): "128x128"}
# The pairs that cuBLASLt multiplies, by GPU: compute capability 9.0 alone, or from 10.0
# on.
_ON_HOPPER = {
    ("rows", "rows"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
}
_ON_BLACKWELL = {("1x32", "1x32")}


def checked(op, name, block):
    """Return a block as a tuple of integers of at least 1, or None."""

    def is_size(b):
        return b is None or (isinstance(b, (int, np.integer)) and b >= 1)

    is_pair = isinstance(block, (tuple, list)) and len(block) == 2
    if not (is_pair and all(map(is_size, block))):
        raise ValueError(
            f"{op}: {name}: expected (rows, columns), each a positive int, or None "
            f"for all, got {block!r}"
        )
    return tuple(block)


def checked_scale(op, prefix, scale, block, leading, rows, cols):
    """Return the inverse scale of an operand `[*leading, *rows, *cols]`, one or one for
    each block, and the block.

    `prefix` is that of the arguments `scale_inv` and `block` in messages.
    """
    name = f"{prefix}scale_inv"
    if block is None:
        return _checks.scale(op, name, scale), None
    block, scale = checked(op, f"{prefix}block", block), _checks.array(op, name, scale)
    if scale.dtype not in (jnp.float32, E8M0):
        raise TypeError(
            f"{op}: {name}: expected float32 or float8_e8m0fnu, got {scale.dtype}; "
            "scales are not rounded"
        )
    needed = *leading, *count(block, math.prod(rows), math.prod(cols))
    return _checks.shape(op, name, scale, needed), block


def scale_names(leading, rows, cols, block):
    """Return the names of the dimensions of scales, given those of a matrix; without a
    block it has one scale.
    """
    if block is None:
        return ONE
    return leading, (blocks_of(rows, block[0]),), (blocks_of(cols, block[1]),)


def shape(block, m, n):
    """Return the size of a block in a matrix `[m, n]`."""
    return tuple(
        max(size, 1) if b is None else b for b, size in zip(block, (m, n), strict=True)
    )


def count(block, m, n):
    """Return how many blocks a matrix `[m, n]` has along its rows and columns."""
    # No float arithmetic and no comparison by order: a size of a program to be exported
    # may be symbolic.
    return tuple(
        int(size != 0) if b is None else -(-size // b)
        for b, size in zip(block, (m, n), strict=True)
    )


def cut(x, block):
    """Cut `[..., m, n]` into `[..., R, r, C, c]`; zeros fill up the last block of a
    dimension.
    """
    *leading, m, n = x.shape
    (r, c), (rows, cols) = shape(block, m, n), count(block, m, n)
    # Zeros do not change the amax of a block, and `uncut` removes them.
    x = _shapes.pad(x, rows * r - m, cols * c - n)
    return x.reshape(*leading, rows, r, cols, c)


def uncut(x, m, n):
    """Undo `cut`."""
    *leading, rows, r, cols, c = x.shape
    return x.reshape(*leading, rows * r, cols * c)[..., :m, :n]


def spread(scales, block, m, n):
    """Repeat scales `[..., R, C]` for each element of a matrix `[m, n]`."""
    r, c = shape(block, m, n)
    *leading, rows, cols = scales.shape
    axes = (*range(len(leading) + 1), len(leading) + 2)
    return uncut(lax.broadcast_in_dim(scales, (*leading, rows, r, cols, c), axes), m, n)


def scaled(values, scales, block, m, n):
    """Multiply each value of matrices `[m, n]`, given in any shape, by the scale of its
    block, in the values' dtype.
    """
    if scales.dtype == E8M0:
        factors = e8m0_factors(scales, values.dtype)
    else:
        factors = [scales.astype(values.dtype)]
    for factor in factors:
        values = values * spread(factor, block, m, n).reshape(values.shape)
    return values


def power_of_two(exponent, is_nan):
    """Return f32 `2**exponent` for an exponent in [-126, 127]; NaN where `is_nan`."""
    bits = jnp.where(is_nan, 0x7FC00000, (exponent + _BIAS) << 23)
    return bits.view(jnp.float32)


def e8m0_factors(scales, dtype):
    """Return two normal numbers of `dtype` whose product is the scale: each is about
    its square root.
    """
    codes = scales.view(jnp.uint8).astype(jnp.int32)
    exponent, is_nan = codes - _BIAS, codes == _NAN_CODE
    # A single factor is not enough: 2**-127 is subnormal, which XLA's CPU threads read
    # as zero. Its parts, 2**-64 and 2**-63, are normal.
    first = exponent >> 1
    parts = first, exponent - first
    return [power_of_two(part, is_nan).astype(dtype) for part in parts]


def scales_of(amax, dtype, scaling):
    """Return `(scale, scale_inv)` of each block, as `quantize_blocks` says; `scaling`
    is that of the op.

    For E8M0 these are f32 `2**-e`, and `2**e`. FP8_MAX is 1.75 times a power of two in
    both formats, so the exponent of `amax / FP8_MAX`, rounded up, is the difference of
    their exponents, and one more where the significand of amax is above 1.75. The
    exponent of a subnormal amax is read as -127, which does not matter: e is -127 for
    every subnormal amax.
    """
    if scaling.startswith("f32"):
        numerator = _scaling.scale_numerator(fp8_max(dtype), 0)
        scales = _scaling.amax_to_scale(amax, jnp.ones_like(amax), numerator)
        if scaling == "f32_power_2":
            scales = _scaling.floor_to_power_of_two(scales[0])
        return scales
    largest = np.float32(fp8_max(dtype)).view(np.int32)
    bits = amax.view(jnp.int32)
    exponent = (bits >> 23) - int(largest >> 23)
    if scaling == "e8m0_ceil":
        is_above = bits & _MANTISSA_BITS > int(largest & _MANTISSA_BITS)
        exponent = exponent + is_above.astype(jnp.int32)
    exponent, is_nan = jnp.maximum(exponent, -127), bits >= _EXPONENT_BITS
    codes = jnp.where(is_nan, _NAN_CODE, exponent + _BIAS)
    return power_of_two(-exponent, is_nan), codes.astype(jnp.uint8).view(E8M0)


# The layouts of cuBLASLt --------------------------------------------------------------


def mode(block, dtype):
    """Return the name of cuBLASLt's mode for scales of these blocks; None where it has
    no mode.
    """
    is_e8m0 = np.dtype(dtype) == E8M0
    return NAMES.get(block) if is_e8m0 == (block == (1, 32)) else None


def missing(modes, capabilities, power_2_scale=False):
    """Return why cuBLASLt has no product of operands with these two modes on all of
    these GPUs; or None.

    Args:
        modes: the results of `mode` for a and b.
        capabilities: `(major, minor)` of the GPUs; if empty, GPUs that have the product
            are assumed.
        power_2_scale: whether all scales are powers of two.
    """
    # Blackwell has no product with float32 scales, but powers of two convert to E8M0
    # scales: see `as_mx`.
    if runs_as_mx(modes, capabilities, power_2_scale):
        return None
    hopper, scales = modes in _ON_HOPPER, " by ".join(map(str, modes))
    if not (hopper or modes in _ON_BLACKWELL):
        return "cuBLASLt has no product of operands with these scales"
    # A program for GPUs of several kinds runs its kernel on all of them, or the
    # reference on all of them.
    need = "9.0" if hopper else "10.0 or newer"
    for capability in capabilities:
        if capability != (9, 0) if hopper else capability < (10, 0):
            have = ".".join(map(str, capability))
            reason = (
                f"cuBLASLt multiplies scales of {scales} on compute capability "
                f"{need}, this GPU has {have}"
            )
            # One option of the recipe would give these GPUs an FP8 product, so the
            # reason names it.
            if hopper and capability >= (10, 0) and not power_2_scale:
                reason += ", which multiplies those of a recipe with power_2_scale=True"
            return reason
    return None


def runs_as_mx(modes, capabilities, power_2_scale):
    """Return whether a product with float32 scales runs as a product with E8M0 scales
    on these GPUs; see `as_mx`.
    """
    is_blackwell = bool(capabilities) and min(capabilities) >= (10, 0)
    return power_2_scale and modes in _ON_HOPPER and is_blackwell


def depth(mode):
    """Return the multiple to which k is padded, so that blocks along it are whole and
    rows are 16-byte pieces.
    """
    return {"rows": 16, "1x32": 32}.get(mode, 128)


def stored_shape(block, rows, k):
    """Return the shape of the scales of one matrix `[rows, k]` as custom calls write
    and read them.

    The scales lie in tiles of 128 by 128 elements. The part of a tile beyond the matrix
    has scales too.
    """
    row_tiles, tiles = -(-rows // 128), -(-k // 128)
    shapes = {
        "rows": count(block, rows, k),
        "1x32": (row_tiles, tiles, 512),
        "1x128": (tiles, rows),
        "128x128": (row_tiles, tiles + -tiles % 4),
    }
    return shapes[NAMES[block]]


def by_block(scales, block, rows, k):
    """Order scales `[g, *stored_shape]` as blocks, `[g, R, C]`; if nothing is cut off,
    XLA cancels `to_stored`.
    """
    if block == (1, 128):
        return jnp.swapaxes(scales, 1, 2)
    if block == (1, 32):
        # In a tile of 128 rows by 4 blocks, row r and block b are at [r % 32, r // 32,
        # b].
        g, row_tiles, tiles, _ = scales.shape
        scales = scales.reshape(g, row_tiles, tiles, 32, 4, 4)
        scales = scales.transpose(0, 1, 4, 3, 2, 5)
        scales = scales.reshape(g, row_tiles * 128, tiles * 4)
    r, c = count(block, rows, k)
    return scales[:, :r, :c]


def to_stored(scales, mode, rows):
    """Order scales `[g, R, C]` as custom calls read them; a matrix padded to `rows` has
    scales of 0 in the padding.
    """
    missing_rows = rows - scales.shape[1] if mode in ("rows", "1x128") else 0
    if mode == "rows":
        return _shapes.pad(scales[:, :, 0], missing_rows)
    # The scales of a block along k lie side by side, one for each row.
    if mode == "1x128":
        return jnp.swapaxes(_shapes.pad(scales, missing_rows, 0), 1, 2)
    if mode == "128x128":
        return _shapes.pad(scales, -scales.shape[2] % 4)
    # E8M0 has no zero to pad with, so its scales are padded and moved as bytes, in the
    # order that `by_block` undoes.
    codes = scales.view(jnp.uint8)
    codes = _shapes.pad(codes, -codes.shape[1] % 128, -codes.shape[2] % 4)
    g, m, n = codes.shape
    tiles = codes.reshape(g, m // 128, 4, 32, n // 4, 4).transpose(0, 1, 4, 3, 2, 5)
    return tiles.reshape(g, m // 128, n // 4, 512)


def as_mx(scales, block, rows, k):
    """Convert scales of large blocks, powers of two, to E8M0 scales of blocks of 32,
    `[g, rows, ceil(k / 32)]`.

    Every block of 32 lies in one block of `block`, whose columns are a multiple of 32
    or all of them, and takes its scale. The codes stay. The conversion is exact: an
    E8M0 code is the biased exponent of a float32, so a power of two from 2**-126 to
    2**127 is the same number in both, and `quantize_blocks` makes no other scales. Its
    factor is `FP8_MAX / amax` rounded down to a power of two, at most 2**126, at least
    2**-120 (the amax is below 2**128, FP8_MAX is 448 or more), and 1 where the amax is
    0 or not finite; scales are the inverse. Any other float32 becomes NaN, so that a
    product of scales that are no powers of two is not silently wrong.
    """
    bits = scales.view(jnp.uint32)
    exponent = bits >> 23
    # A power of two has no mantissa. Its exponent is neither 0 (zero, subnormals) nor
    # 255 (Inf, NaN); the sign bit of a negative number, which is shifted in with the
    # exponent, makes it larger than 254.
    is_power = (bits & _MANTISSA_BITS == 0) & (exponent >= 1) & (exponent <= 254)
    codes = jnp.where(is_power, exponent, _NAN_CODE).astype(jnp.uint8)
    # One scale of a row now stands for 32 columns: `block` has c // 32 of them.
    r, c = block
    block = r, None if c is None else c // 32
    return spread(codes, block, rows, -(-k // 32)).view(E8M0)
