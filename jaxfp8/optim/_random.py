"""Random bits by counting: a function of the seed, the step, the leaf and the element, on every platform and mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._blocks import BLOCK, amax_shape, block_axis


def leaf_key(seed: int, step: jax.Array, leaf: int) -> jax.Array:
    """Return the u32 [] that the random bits of one moment in one update come from.

        key = mix(mix(mix(seed) ^ step) ^ leaf)

    Args:
        seed: of the transformation.
        step: i32 [], the number of updates before this one.
        leaf: the number of the moment among the leaves of the optimizer's state.
    """
    return _mix(_mix(_mix(jnp.uint32(seed)) ^ step.astype(jnp.uint32)) ^ np.uint32(leaf))


def random_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a random u32 for each element of a moment of `shape`, in the shape that `split` gives it.

        bits = mix(mix(mix(key ^ block) ^ element))

    Blocks are numbered in the row-major order of their amaxes, modulo 2**32; elements in their blocks.
    """
    axis, sizes = block_axis(shape), amax_shape(shape)
    sizes = (*sizes[: axis + 1], 1, *sizes[axis + 1 :])
    block = jnp.zeros(sizes, jnp.uint32)
    for i, size in enumerate(sizes):
        block = block * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, sizes, i)
    sizes = (*sizes[: axis + 1], min(shape[axis], BLOCK), *sizes[axis + 2 :])
    return _mix(_mix(_mix(key ^ block) ^ lax.broadcasted_iota(jnp.uint32, sizes, axis + 1)))


def _mix(x):
    """Mix the bits of a u32: a bijection in which each bit of x changes half of the bits of the result.

    The finalizer of MurmurHash3 (Appleby, public domain), from a number that is not its fixed point 0.
    """
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
