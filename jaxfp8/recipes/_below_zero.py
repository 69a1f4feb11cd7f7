"""State below zero, which no training step makes: which quantizers have it, and why."""

from typing import Any

import jax
import numpy as np

from . import _state_tree

_NAMED = 4
_MESSAGE = (
    "{names}: expected a state that is not negative, got {least}: an optimizer has "
    "stepped on it, or under jit the whole gradient was clipped or averaged, or was "
    "that of another step. Its scale is NaN from then on, and so are its products. "
    "Keep the state out of the optimizer, as jaxfp8.train.optimizer and "
    "jaxfp8.linen.TrainState do, and out of norms, clips and averages, which are of "
    "grads['params']"
)
REPAIR = "; repair it by jaxfp8.convert.reset_state(tree, only_bad=True)"


def message(least: dict[str, float]) -> str:
    """Return a message about quantizers below zero, given the smallest number of each
    by name.
    """
    names = list(least)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return _MESSAGE.format(
        names=", ".join(names[:_NAMED]) + more, least=f"{min(least.values()):.4g}"
    )


def describe(flat: _state_tree.StateTree) -> str:
    """Return the message about the quantizers of a tree that are below zero; empty
    where none is.

    Quantizers that are traced, or that this process cannot see, are left out: one
    process must not act alone.
    """
    least = smallest({q.name: q.leaves for q in flat.quantizers})
    return message(least) if least else ""


def smallest(named: dict[str, Any]) -> dict[str, float]:
    """Return the smallest number of each quantizer that is below zero, of leaves by
    name, without quantizers that are traced or that this process cannot see.
    """
    least = {}
    for name, leaves in named.items():
        if all(map(is_visible, leaves)):
            for leaf in jax.device_get(leaves):
                numbers = np.nan_to_num(leaf, nan=0.0)
                number = float(np.min(numbers, initial=least.get(name, 0)))
                if number < 0:
                    least[name] = number
    return least


def is_visible(leaf: Any) -> bool:
    """Tell whether this process has all numbers of an array."""
    if isinstance(leaf, jax.core.Tracer):
        return False
    if not isinstance(leaf, jax.Array):
        return True
    return leaf.is_fully_addressable or leaf.is_fully_replicated
