"""Find the quantizers of a tree, with their names and arrays, for the functions of this package."""

from typing import Any, NamedTuple

import jax

from ..recipes import _state_tree


class Arrays(NamedTuple):
    """The state of one quantizer, or of a stack of quantizers, with the slots moved to the last axis.

    Attributes:
        name: the path below the state collection: `Dense_0/Fp8DotGeneral_0/input`.
        amax_history: `[..., H]`, slot 0 newest, slot 1 oldest; 0 means nothing was recorded.
        scale_inv: `[..., 1]`.
    """

    name: str
    amax_history: Any
    scale_inv: Any

    @property
    def stack(self) -> tuple[int, ...]:
        """The leading dimensions, which count the layers of a stack."""
        return self.amax_history.shape[:-1]


def quantizers(where: str, tree) -> list[Arrays]:
    """Return the quantizers of a tree with FP8 state, in the order of the tree, without those in an optimizer's state.

    Args:
        where: the function and the argument, for messages.
        tree: Linen variables, a TrainState, an NNX model or state, a DotGeneralState, or any tree with these inside.

    Raises:
        ValueError: the tree has no quantizer, or the shapes of a history and its scale do not fit.
    """
    flat = _state_tree.flatten(tree)
    arrays = []
    for quantizer in flat.quantizers:
        # Moments that an optimizer keeps for state have the names of state too, but are not quantizers.
        if "opt_state" in flat.paths[quantizer.amax_history]:
            continue
        leaves = [flat.leaves[i] for i in quantizer.positions()]
        axis = _state_tree.slot_axis(f"{where}: {quantizer.name}", *leaves)
        # Transforms stack along any axis; here the slots go last.
        is_last = axis in (-1, leaves[0].ndim - 1)
        history, scale_inv = leaves if is_last else (jax.numpy.moveaxis(leaf, axis, -1) for leaf in leaves)
        _, collection, name = f"/{quantizer.name}".partition(f"/{_state_tree.OVERWRITE_WITH_GRADIENT}/")
        arrays.append(Arrays(name if collection else quantizer.name, history, scale_inv))
    if not arrays:
        raise ValueError(
            f"{where}: expected a tree that holds FP8 state (amax_history and scale side by side), got "
            f"{jax.tree.structure(tree).num_leaves} leaves without it; only delayed scaling keeps such state"
        )
    return arrays
