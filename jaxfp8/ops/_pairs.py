"""Pairs in programs for TPUs: arrays `[..., 2, n]`, such as the kernels of gate and up side by side, in two halves.

JAX lays a parameter `[k, 2, n]` and its gradient out in tiles of 2 rows by 128 columns. XLA computes such a tile in a
register of 8 rows. So codes lie half by half (`numerics/_tpu.py`), products give halves, and what reads the result of a
product takes its halves from there.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ..numerics import _tpu


def are_apart(shape: tuple[int, ...], devices: str) -> bool:
    """Tell whether a product with columns of this shape is one with each half."""
    return len(shape) == 2 and shape[0] == 2 and devices in _tpu.ONE_DEVICE


def halves(x: jax.Array, axis: int = -2) -> list[jax.Array]:
    """Return both halves of x, without the dimension of 2."""
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(2)]


def joined(parts: list[jax.Array], is_gradient: bool = False) -> jax.Array:
    """Stack halves `[..., n]` to `[..., 2, n]`: XLA drops the stack where halves alone are read.

    The gradient of a parameter is read outside of the program, in tiles of 2 by 128. These are the bytes of
    `[k, n / 128, 2, 128]`, and so those of `[k, n / 64, 128]` in tiles of 8 by 128, which take XLA a third of the
    cycles. Without the constraints it chooses tiles of 2 rows for the copies too.
    """
    if not is_gradient or parts[0].ndim != 2 or parts[0].dtype != jnp.float32:
        return jnp.stack(parts, axis=-2)
    k, n = parts[0].shape
    if k % 8 or n % 512:
        return jnp.stack(parts, axis=-2)
    # 1. Let the tiles of both halves take turns: [k / 8, n / 64, 8, 128].
    tiles = [part.reshape(k // 8, 8, n // 128, 128).transpose(0, 2, 1, 3) for part in parts]
    tiles = _row_major(jnp.stack(tiles, axis=2).reshape(k // 8, n // 64, 8, 128))
    # 2. Bring the tiles of each row of k together. The rest moves no bytes.
    rows = _row_major(tiles.transpose(0, 2, 1, 3))
    return _row_major(rows.reshape(k, n // 128, 2, 128)).transpose(0, 2, 1, 3).reshape(k, 2, n)


def _row_major(x):
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
