"""quantized: wraps an optax transformation to keep its moments in FP8.

Random bits are made by counting: a function of the seed, the step, the leaf and the element, on every mesh.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ..ops import _moments
from ._blocks import amax_shape
from ._moments import SquaredMoment, encode_changes
from ._state import MOMENTS, QuantizedState, Table, check, dequantize_moments, is_moment, quantize_state


def quantized(
    tx: optax.GradientTransformation, *, min_size: int = 4096, moments: Table | None = None, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Keep the moments of `tx` in FP8: 2.1 bytes a parameter for Adam's, which take 8 in float32.

        tx = jaxfp8.optim.quantized(optax.adamw(1e-3))
        opt_state = tx.init(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    `tx` sees its moments in float32. After the update each block of 128 elements is quantized with an amax of its own;
    a block that the update did not change keeps its bits. The rest of the state, and moments of less than `min_size`
    elements, stay as they are.

    Blocks lie along the last axis with at least 64 elements, or else along the largest axis. State and random bits are
    the same on every mesh. Inside of `jax.shard_map` each shard has blocks of its own.

    Args:
        tx: an optax transformation, such as a chain. Other transformations (`optax.masked`, `optax.multi_transform`,
            `jaxfp8.train.optimizer`) may wrap the result, or be part of `tx`.
        min_size: the number of elements from which on a moment is quantized.
        moments: the moments in states of your own, besides those of optax: for each NamedTuple class a dict from its
            fields to `SignedMoment` or `SquaredMoment`: `{MyState: {"momentum": jaxfp8.optim.SignedMoment}}`.
        seed: an int, the seed of the random bits that round squared moments.

    Returns:
        The transformation; its state is a `QuantizedState`.

    Raises:
        ValueError: in `init`, `tx` has no state whose moments are known, or already has moments in FP8; in `update`,
            the state is not that of this transformation.
    """
    table = MOMENTS | dict(moments or {})
    tx = optax.with_extra_args_support(tx)

    def init(params):
        return quantize_state(tx.init(params), min_size=min_size, moments=moments)

    def update(grads, state, params=None, **extra_args):
        # 1. Update with moments in float32.
        check(state, table, min_size)
        updates, after = tx.update(grads, dequantize_moments(state.inner), params, **extra_args)

        # 2. Quantize the moments that have changed. Each leaf has a number, and with it random bits of its own.
        numbers = itertools.count()

        def requantize(old, new):
            number = next(numbers)
            if not is_moment(old):
                return new
            if not isinstance(old, SquaredMoment):
                return encode_changes(old, new, None)
            return encode_changes(old, new, block_keys(leaf_key(seed, state.count, number), new.shape))

        inner = jax.tree.map(requantize, state.inner, after, is_leaf=is_moment)
        return updates, QuantizedState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


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
