"""State that begins again: empty histories and scale 1, everywhere or where an optimizer has stepped on it."""

from typing import Any

import jax.numpy as jnp

from ..numerics import _scaling
from ..recipes import _state_tree


def reset_state(tree: Any, *, only_bad: bool = False) -> Any:
    """Reset the state of delayed scaling to what `init` makes: empty histories, scale 1, counters 0.

        variables = jaxfp8.convert.reset_state(variables, only_bad=True)
        nnx.update(model, jaxfp8.convert.reset_state(nnx.state(model), only_bad=True))

    An optimizer that steps on state makes numbers below zero, which no step of delayed scaling does; the scale of such
    a quantizer is NaN (docs/numerics.md). Repair the training loop first, and the parameters if they are NaN.

    Args:
        tree: any tree with history f32 `(..., H)` and scale f32 `(..., 1)` side by side: a variables dict, a
            TrainState, an NNX state, a `DotGeneralState`. States of users' own quantizers stay as they are.
        only_bad: reset only the rows (a quantizer, or one layer of a stack) with an entry or a scale below zero.

    Returns:
        The same tree; other leaves are those of `tree`.

    Raises:
        ValueError: the tree has no state of delayed scaling.
    """
    flat = _state_tree.flatten(tree)
    if not flat.quantizers:
        raise ValueError(
            "reset_state: tree: expected amax_history and scale side by side, got a tree without them; pass the "
            "variables, or the state of delayed scaling"
        )
    values = {}
    for quantizer in flat.quantizers:
        positions = quantizer.positions()
        leaves = [jnp.asarray(flat.leaves[i]) for i in positions]
        # Transforms stack state along any axis, so the slots need not be last.
        axis = _state_tree.slot_axis(f"reset_state: tree: {quantizer.name}", *leaves[:2])
        history, scale = leaves[:2]
        # One slot below zero gives its whole row a NaN scale, so the row is reset as a whole.
        is_bad = jnp.any(_scaling.below_zero(history), axis, keepdims=True) | _scaling.below_zero(scale)
        # The first values of the history, the scale and, where there are any, the counters.
        for position, leaf, initial in zip(positions, leaves, (0, 1, 0), strict=False):
            value = jnp.full_like(leaf, initial)
            values[position] = jnp.where(is_bad, value, leaf) if only_bad else value
    return flat.replace(values)
