"""Codec, amax and pairs of programs for TPUs: float arithmetic and casts, which XLA
fuses with what is around them.

A TPU casts to FP8 with one rounding, and XLA's reductions there keep what is compared
before them. So the integer steps of _codec.py and _scaling.py are left out. The results
are the same, unless an input is below 2**-126: a TPU reads it as zero. The product of
an input and its scale may be below that: FP8 rounds it to zero anyway.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

_PARTS = 8  # of an amax; with 16 the estimate falls by half a percent of a Dense step

# Programs of one device: on a mesh XLA may cut any dimension.
ONE_DEVICE = ("one", "shard")

# The devices of the TPU program that is traced, as `_compat.devices_of` names them:
# "one", "mesh", "shard", "unknown"; None where the program is for another platform. The
# context is part of jit's cache key.
devices = jax.make_user_context(default_value=None)


def is_target():
    """Tell whether the program that is traced is for TPUs."""
    return devices.value is not None


def encode(x, scale, dtype):
    """Compute the FP8 codes of `x * scale`; NaN where the product is NaN or x is
    Inf.
    """
    x, largest = x.astype(jnp.float32), float(jnp.finfo(dtype).max)
    saturated = jnp.clip(x * scale, -largest, largest)
    codes = jnp.where(jnp.abs(x) < jnp.inf, saturated, jnp.float32(jnp.nan)).astype(
        dtype
    )
    if x.ndim > 2 and x.shape[-2] == 2 and devices.value in ONE_DEVICE:
        # Each half of a pair in its own tiles: tiles of 2 rows would take four times
        # the steps.
        codes = with_layout_constraint(
            codes, Layout((x.ndim - 2, *range(x.ndim - 2), x.ndim - 1))
        )
    return codes


def decode(data, scale_inv, dtype):
    """Compute `data * scale_inv`, rounded once to f32 and once to `dtype`."""
    return (data.astype(jnp.float32) * scale_inv).astype(dtype)


def abs_max(x, axis):
    """Compute the max of |x| as f32, where NaN counts as +inf; 0 for an empty array."""
    # Not in bfloat16: XLA fuses the reduction with the quantization of x where both
    # begin with the same conversion. `is_finite` is not the comparison in `encode`: if
    # both were one, XLA would quantize the slices of stacked kernels twice, in two
    # shapes, and with no |x| in common it would read float32 kernels twice.
    return jnp.max(_magnitudes(x.astype(jnp.float32)), axis=axis, initial=0)


def _magnitudes(x):
    return jnp.where(lax.is_finite(x), jnp.abs(x), jnp.inf)


def larger(x, y):
    """Compute the larger magnitude of each element of two f32 arrays; NaN counts as
    infinite.
    """
    return jnp.maximum(_magnitudes(x), _magnitudes(y))


def abs_max_by_parts(x):
    """Compute `abs_max` over all axes of an x whose amax no pass over x computes along
    with codes.

    XLA estimates a fixed cost for each step of a reduction, so each step takes the
    largest of eight parts of x. A part is whole tiles of 8 or 16 rows. On a mesh the
    parts may lie on other devices: there x is reduced as it is.
    """
    if devices.value not in ONE_DEVICE or x.ndim < 2 or x.shape[0] % (16 * _PARTS):
        return abs_max(x, None)
    magnitudes = list(map(_magnitudes, jnp.split(x, _PARTS)))
    largest = functools.reduce(jnp.maximum, magnitudes)
    return jnp.max(largest, initial=0).astype(jnp.float32)


# Pairs: arrays `[..., 2, n]`, such as the kernels of gate and up side by side. JAX lays
# a parameter `[k, 2, n]` and its gradient out in tiles of 2 rows by 128 columns, which
# XLA computes in registers of 8 rows. So codes lie half by half (`encode`), products
# give halves, and what reads the result of a product takes its halves from there.


def are_apart(shape):
    """Tell whether a product with columns of this shape is one with each half."""
    return len(shape) == 2 and shape[0] == 2 and devices.value in ONE_DEVICE


def halves(x, axis=-2):
    """Return both halves of x, without the dimension of 2."""
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(2)]


def joined(parts, is_gradient=False):
    """Stack halves `[..., n]` to `[..., 2, n]`: XLA drops the stack where halves alone
    are read.

    The gradient of a parameter is read outside of the program, in tiles of 2 by 128.
    These are the bytes of `[k, n / 128, 2, 128]`, and so those of `[k, n / 64, 128]` in
    tiles of 8 by 128, which take XLA a third of the cycles. Without the constraints it
    chooses tiles of 2 rows for the copies too.
    """
    if not is_gradient or parts[0].ndim != 2 or parts[0].dtype != jnp.float32:
        return jnp.stack(parts, axis=-2)
    k, n = parts[0].shape
    if k % 8 or n % 512:
        return jnp.stack(parts, axis=-2)
    # 1. Let the tiles of both halves take turns: [k / 8, n / 64, 8, 128].
    tiles = [
        part.reshape(k // 8, 8, n // 128, 128).transpose(0, 2, 1, 3) for part in parts
    ]
    tiles = _row_major(jnp.stack(tiles, axis=2).reshape(k // 8, n // 64, 8, 128))
    # 2. Bring the tiles of each row of k together. The rest moves no bytes.
    rows = _row_major(tiles.transpose(0, 2, 1, 3))
    return (
        _row_major(rows.reshape(k, n // 128, 2, 128))
        .transpose(0, 2, 1, 3)
        .reshape(k, 2, n)
    )


def _row_major(x):
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# Blocks of 128 elements along the last axis, such as those of moments, each with a
# number of its own: a block is a row of lanes. To spread a number to lanes XLA takes
# some eight cycles for a register of 8 x 128 elements, and more for integers of 8 bits;
# the matrix unit takes three.

BLOCK = 128
_MAX_BLOCKS = 1024  # of a row, in one product


def each(numbers):
    """Give each element the number of its block, an f32 or an integer below 2**24; no
    bit is below 2**-126.

    It is the sum of three parts of 8 significant bits, which products with ones and
    zeros keep. Ones and zeros are as many as the square of the blocks: of a row with
    very many, each part has a product of its own.
    """
    *leading, count = numbers.shape
    if count > _MAX_BLOCKS:
        parts = jnp.pad(
            numbers, [(0, 0)] * len(leading) + [(0, -count % BLOCK)]
        ).reshape(*leading, -1, BLOCK)
        return each(parts).reshape(*leading, -1)[..., : count * BLOCK]
    rest, parts = numbers.astype(jnp.float32), []
    for _ in range(3):
        upper_bits = rest.view(jnp.int32) & -0x10000
        parts.append(upper_bits.view(jnp.float32))
        rest = rest - parts[-1]
    part, element = (
        lax.broadcasted_iota(jnp.int32, (3 * count, BLOCK * count), i) for i in range(2)
    )
    is_in_block = (part % max(count, 1) == element // BLOCK).astype(jnp.bfloat16)
    parts = jnp.concatenate(parts, axis=-1).astype(jnp.bfloat16)
    elements = jnp.matmul(parts, is_in_block, preferred_element_type=jnp.float32)
    return elements.astype(numbers.dtype)


def reduce_blocks(function, x):
    """Reduce blocks, as rows of tiles of 8 rows by 128 columns, which are how x is in
    memory: nothing moves.
    """
    *leading, columns = x.shape
    rows = leading[-1] if leading else 1
    height = 1 if rows % 8 else 8
    tiles = x.reshape(
        *leading[:-1], rows // height, height, columns // BLOCK, BLOCK
    ).swapaxes(-3, -2)
    numbers = function(tiles, axis=-1).swapaxes(-2, -1)
    return numbers.reshape(*leading, columns // BLOCK)
