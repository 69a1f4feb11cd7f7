"""The quantizers of a tree, as the functions of this package read them: their arrays and their names."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..recipes import _state_tree


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The state of one quantizer, or of a stack of them, along whatever axis a transform has stacked it.

    Attributes:
        name: its path below the state collection: `Dense_0/Fp8DotGeneral_0/input`.
        amax_history: `[..., H]`, slot 0 newest, slot 1 oldest; 0 means nothing was recorded.
        scale_inv: `[..., 1]`.
        counters: `[..., 3]`: fraction saturated, fraction flushed to zero, steps since the scale last changed; or None.
    """

    name: str
    amax_history: Any
    scale_inv: Any
    counters: Any

    @property
    def stack(self) -> tuple[int, ...]:
        """Return the leading dimensions, those of a stack of layers."""
        return self.amax_history.shape[:-1]


def quantizers(where: str, tree) -> list[Arrays]:
    """Return the quantizers of any tree with FP8 state in it, in its order, without those of an optimizer's state.

    Args:
        where: how messages call the tree.
        tree: Linen variables, a TrainState, an NNX model or state, a DotGeneralState, or any tree with these inside.

    Raises:
        ValueError: there are none; a history and its scale do not fit.
    """
    flat = _state_tree.flatten(tree)
    arrays = []
    for quantizer in flat.quantizers:
        # Moments that an optimizer keeps of state have its names too, and are no quantizers.
        if "opt_state" in flat.paths[quantizer.amax_history]:
            continue
        leaves = [flat.leaves[i] for i in quantizer.positions()]
        axis = _state_tree.slot_axis(f"{where}: {quantizer.name}", *leaves[:2])
        # Transforms stack along any axis; whoever reads these arrays gets the slots last.
        history, scale_inv, *counters = (_slots_last(leaf, axis) for leaf in leaves)
        arrays.append(Arrays(_below_collection(quantizer.name), history, scale_inv, next(iter(counters), None)))
    if not arrays:
        raise ValueError(
            f"{where}: expected a tree that holds FP8 state (amax_history and scale side by side), got "
            f"{jax.tree.structure(tree).num_leaves} leaves without one; recipes other than delayed scaling keep none"
        )
    return arrays


def _slots_last(leaf, axis: int):
    return leaf if axis in (-1, leaf.ndim - 1) else jnp.moveaxis(leaf, axis, -1)


def _below_collection(name: str) -> str:
    parts = name.split("/")
    if _state_tree.OVERWRITE_WITH_GRADIENT in parts:
        parts = parts[parts.index(_state_tree.OVERWRITE_WITH_GRADIENT) + 1 :]
    return "/".join(parts)
