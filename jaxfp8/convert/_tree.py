"""Read the quantizer state of a tree of variables: modules by path, and the leaves of a
module by name.

A module is `{leaf name: array}`; all modules of a collection are `{path: module}`,
where a path is a tuple of names.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import serialization, traverse_util

from ..mixed_precision import DynamicLossScale
from ..recipes import (
    OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT,
    DotGeneralState,
    QuantizerState,
)

OPERANDS = ("input", "kernel", "output_grad")
LEAVES = ("amax_history", "scale")
STATE = tuple(f"{operand}_{leaf}" for operand in OPERANDS for leaf in LEAVES)

Path = tuple[str, ...]
Modules = dict[Path, dict[str, object]]


def convert_state(where: str, variables: Mapping, convert: Callable) -> dict:
    """Replace the modules of the state's collection of `variables` by those that
    `convert` makes of them.

    `convert(modules)` yields `(path, leaves by name)` for the modules of the result;
    the leaves of a module may come in parts.

    Other collections stay as they are. Variables without that collection are taken as
    the bare collection itself, and the result is a bare collection too.

    Raises:
        TypeError: `variables` is not a dict.
        ValueError: the modules hold no FP8 state, so `convert` yields nothing; or two
            leaves get the same name.
    """
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"{where}: variables: expected a dict of variables or of one collection, "
            f"got {type(variables).__name__}; of a TrainState pass `.params`"
        )
    is_bare = OVERWRITE_WITH_GRADIENT not in variables
    # 1. Convert, and refuse a tree in which there was nothing to convert.
    converted: Modules = {}
    for path, leaves in convert(
        modules_of(where, variables if is_bare else variables[OVERWRITE_WITH_GRADIENT])
    ):
        insert(where, converted, path, leaves)
    if not converted:
        raise ValueError(
            f"{where}: variables: expected a collection {OVERWRITE_WITH_GRADIENT!r} "
            f"with FP8 state, or such a collection itself, got {sorted(variables)}"
        )
    # 2. Put the result where the state was; a bare collection comes back bare.
    return (
        nested(converted)
        if is_bare
        else {**variables, OVERWRITE_WITH_GRADIENT: nested(converted)}
    )


def modules_of(where: str, collection: Mapping) -> Modules:
    """Return the modules of a collection that hold arrays.

    Raises:
        TypeError: a leaf is not an array.
    """
    modules: Modules = {}
    for (*path, name), leaf in traverse_util.flatten_dict(collection).items():
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


def is_counters(name: str, module: Iterable[str]) -> bool:
    """Tell whether `name` is the counters of a quantizer in a module with these leaf
    names.
    """
    prefix = name.removesuffix("_counters")
    return prefix != name and f"{prefix}_amax_history" in module


def insert(where: str, modules: Modules, path: Path, module: dict) -> None:
    """Add leaves to the module at `path`; raise a ValueError where a name is there
    already.
    """
    leaves = modules.setdefault(path, {})
    for name in module:
        if name in leaves:
            raise ValueError(
                f"{where}: {at(path, name)}: two quantizers would get this name; "
                "rename one module first"
            )
    leaves.update(module)


def quantizer(where: str, path: Path, module: dict, prefix: str) -> tuple:
    """Return `(amax_history [..., H], scale [..., 1])` of one quantizer in float32.

    Raises:
        TypeError: a leaf has no floating dtype.
        ValueError: a leaf is missing or has another shape.
    """
    history, scale = (_leaf(where, path, module, f"{prefix}_{leaf}") for leaf in LEAVES)
    if history.ndim < 1 or history.shape[-1] < 1:
        raise ValueError(
            f"{where}: {at(path, prefix)}_amax_history: expected (..., H), H >= 1, "
            f"got {history.shape}"
        )
    # History and scale may be stacked, in the same way.
    expected = (*history.shape[:-1], 1)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"{where}: {at(path, prefix)}_scale: expected shape {expected} beside a "
            f"history of shape {history.shape}, got {tuple(scale.shape)}"
        )
    return history, scale


def named(prefix: str, history, scale) -> dict[str, object]:
    """Return the leaves of one quantizer by name."""
    return {f"{prefix}_amax_history": history, f"{prefix}_scale": scale}


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


def _names(state) -> list[str]:
    return [
        field.name
        for field in dataclasses.fields(state)
        if not field.metadata.get("static")
    ]


def _to_state_dict(state) -> dict:
    return {
        name: serialization.to_state_dict(getattr(state, name))
        for name in _names(state)
    }


def _from_state_dict(target, saved: dict):
    names = _names(target)
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
