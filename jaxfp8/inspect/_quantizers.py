"""The quantizers of a tree, as the functions of this package see them: their arrays and their names."""

import dataclasses
from typing import Any

import jax

from .. import _state_tree

_COUNTERS = "counters"


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What is stored of one quantizer, or of a stack of them.

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
        """The leading dimensions, of the layers of a stack."""
        return self.amax_history.shape[:-1]


def quantizers(where: str, tree) -> list[Arrays]:
    """The quantizers of any tree with FP8 state in it, in its order. What an optimizer holds is no state.

    Args:
        where: how messages call the tree.
        tree: Linen variables, a TrainState, an NNX model or state, a DotGeneralState, or any tree with these inside.

    Raises:
        ValueError: there are none.
    """
    found = _state_tree.flatten(tree)
    by_path = found.by_path()
    arrays = []
    for quantizer in found.quantizers:
        path = found.paths[quantizer.amax_history]
        if "opt_state" in path:
            continue
        counters = (*path[:-1], path[-1].removesuffix("amax_history") + _COUNTERS)
        history, scale_inv = found.leaves[quantizer.amax_history], found.leaves[quantizer.scale]
        arrays.append(Arrays(_below_collection(quantizer.name), history, scale_inv, by_path.get(counters)))
    if not arrays:
        raise ValueError(
            f"{where}: expected a tree that holds FP8 state (amax_history and scale side by side), got "
            f"{jax.tree.structure(tree).num_leaves} leaves without one; recipes other than delayed scaling keep none"
        )
    return arrays


def _below_collection(name: str) -> str:
    parts = name.split("/")
    if _state_tree.OVERWRITE_WITH_GRADIENT in parts:
        parts = parts[parts.index(_state_tree.OVERWRITE_WITH_GRADIENT) + 1 :]
    return "/".join(parts)
