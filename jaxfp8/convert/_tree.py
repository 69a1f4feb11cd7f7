"""Read the quantizer state of a tree of variables: modules by path, and the leaves of a
module by name.

A module is `{leaf name: array}`; all modules of a collection are `{path: module}`,
where a path is a tuple of names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import serialization, traverse_util

from ..mixed_precision import DynamicLossScale
from ..recipes import DotGeneralState, QuantizerState, _state_tree
from ..train import StackedState, unstack_state

OPERANDS = ("input", "kernel", "output_grad")
LEAVES = ("amax_history", "scale")
STATE = {f"{operand}_{leaf}" for operand in OPERANDS for leaf in LEAVES}

Path = tuple[str, ...]
Modules = dict[Path, dict[str, object]]


def modules_of(where: str, collection: Mapping) -> Modules:
    """Return the modules of a collection that hold arrays.

    Raises:
        TypeError: a leaf is not an array.
    """
    modules: Modules = {}
    leaves = traverse_util.flatten_dict(unstack_state(collection))
    for (*path, name), leaf in leaves.items():
        if not hasattr(leaf, "dtype"):
            raise TypeError(
                f"{where}: {at(tuple(path), name)}: expected an array, got "
                f"{type(leaf).__name__}"
            )
        modules.setdefault(tuple(path), {})[name] = leaf
    return modules


def nested(modules: Modules) -> dict:
    """Nest modules to a tree, the inverse of `modules_of`."""
    leaves = {
        (*path, name): leaf
        for path, module in modules.items()
        for name, leaf in module.items()
    }
    return traverse_util.unflatten_dict(leaves)


def quantizer(where: str, path: Path, module: dict, prefix: str) -> tuple:
    """Return the history and the scale of one quantizer in float32.

    Raises:
        TypeError: a leaf has no floating dtype.
        ValueError: a leaf is missing, or the shapes do not fit.
    """
    history, scale = (_leaf(where, path, module, f"{prefix}_{leaf}") for leaf in LEAVES)
    _state_tree.slot_axis(f"{where}: {at(path, prefix)}", history, scale)
    return history, scale


def _leaf(where, path, module, name):
    if name not in module:
        raise ValueError(
            f"{where}: {at(path, name)}: missing; the module has {sorted(module)}. "
            "Drop the module from the tree to start it with empty state"
        )
    leaf = module[name]
    # A float32 leaf is returned unchanged, so that it stays on its devices.
    if leaf.dtype == np.float32:
        return leaf
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise TypeError(
            f"{where}: {at(path, name)}: expected a floating dtype, got {leaf.dtype}"
        )
    return leaf.astype(np.float32)


def at(path: Path, name: str = "") -> str:
    """Join a path, and the name of a leaf, by `/`, as messages and patterns have
    paths.
    """
    return "/".join((*path, name) if name else path)


_COUNTERS = "counters"  # of releases until 0.2


def _to_state_dict(state) -> dict:
    names = [
        field.name
        for field in dataclasses.fields(state)
        if not field.metadata.get("static")
    ]
    return {name: serialization.to_state_dict(getattr(state, name)) for name in names}


def _from_state_dict(target, saved: dict):
    names = list(_to_state_dict(target))
    if set(saved) - {_COUNTERS} != set(names):
        raise ValueError(
            f"flax.serialization: {type(target).__name__}: expected the fields "
            f"{names}, got {sorted(saved)}; this checkpoint holds something else"
        )
    values = {
        name: serialization.from_state_dict(
            getattr(target, name), saved[name], name=name
        )
        for name in names
    }
    return dataclasses.replace(target, **values)


for _cls in (DotGeneralState, QuantizerState, DynamicLossScale):
    serialization.register_serialization_state(
        _cls, _to_state_dict, _from_state_dict, override=True
    )


def _stacked_to_state_dict(state: StackedState) -> Any:
    return serialization.to_state_dict(state.unstacked())


def _stacked_from_state_dict(target: StackedState, saved: dict) -> StackedState:
    # a target of jax.eval_shape has no arrays
    positions = range(len(target.places))
    empty = target.treedef.unflatten(positions)
    return StackedState.stack(serialization.from_state_dict(empty, saved))


serialization.register_serialization_state(
    StackedState, _stacked_to_state_dict, _stacked_from_state_dict, override=True
)
