"""Random bits by counting: a function of the seed, the step, the leaf and the element, on every platform and mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ops import _moments
from ._blocks import amax_shape


def leaf_key(seed: int, step: jax.Array, leaf: int) -> jax.Array:
    """Return the key u32[] from which the random bits of one moment in one update are made.

        key = mix(mix(mix(seed) ^ step) ^ leaf)

    Args:
        seed: the seed of the transformation.
        step: i32 [], the number of updates before this one.
        leaf: the number of the moment among the leaves of the optimizer's state.
    """
    mix = _moments.mix
    return mix(mix(mix(jnp.uint32(seed)) ^ step.astype(jnp.uint32)) ^ np.uint32(leaf))


def block_keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a key for each block of a moment of `shape`, u32 in the shape of its amaxes.

        keys = mix(key ^ block)

    Blocks are numbered in the row-major order of their amaxes, modulo 2**32.
    """
    sizes = amax_shape(shape)
    block = jnp.zeros(sizes, jnp.uint32)
    for i, size in enumerate(sizes):
        block = block * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, sizes, i)
    return _moments.mix(key ^ block)
