"""quantized: wraps an optax transformation to keep its moments in FP8."""

import itertools

import jax
import optax

from ._moments import SquaredMoment, encode_changes
from ._random import block_keys, leaf_key
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
    elements, stay what they are.

    Blocks lie along the last axis that has 64 elements, or else the largest, whatever the mesh is: the state and its
    random bits do not depend on it. Inside of `jax.shard_map` they are those of each shard.

    Args:
        tx: an optax transformation, such as a chain. It may be inside of others (`optax.masked`,
            `optax.multi_transform`, `jaxfp8.train.optimizer`) and they inside of it.
        min_size: the number of elements from which on a moment is quantized.
        moments: for states of your own, their NamedTuple -> field -> `SignedMoment` or `SquaredMoment`, in addition to
            those of optax: `{MyState: {"momentum": jaxfp8.optim.SignedMoment}}`.
        seed: of the random bits that round squared moments.

    Returns:
        The transformation; its state is a `QuantizedState`.

    Raises:
        ValueError: at `init`, `tx` has no state whose moments are known, or has moments in FP8; at `update`, the state
            is not one of this transformation.
    """
    table = MOMENTS | dict(moments or {})
    tx = optax.with_extra_args_support(tx)

    def init(params):
        return quantize_state(tx.init(params), min_size=min_size, moments=moments)

    def update(grads, state, params=None, **extra_args):
        # 1. Update as without FP8.
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
