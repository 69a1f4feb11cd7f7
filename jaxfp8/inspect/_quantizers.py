"""The quantizers of a tree, as the functions of this package read them: their arrays and their names."""

from typing import Any, NamedTuple

import jax

from ..recipes import _state_tree


class Arrays(NamedTuple):
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
        is_last = axis in (-1, leaves[0].ndim - 1)
        history, scale_inv, *counters = leaves if is_last else (jax.numpy.moveaxis(leaf, axis, -1) for leaf in leaves)
        _, collection, name = f"/{quantizer.name}".partition(f"/{_state_tree.OVERWRITE_WITH_GRADIENT}/")
        arrays.append(Arrays(name if collection else quantizer.name, history, scale_inv, next(iter(counters), None)))
    if not arrays:
        raise ValueError(
            f"{where}: expected a tree that holds FP8 state (amax_history and scale side by side), got "
            f"{jax.tree.structure(tree).num_leaves} leaves without one; recipes other than delayed scaling keep none"
        )
    return arrays
