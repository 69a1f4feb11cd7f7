"""Paths and dtypes of the leaves of variables, for converters; state in the checkpoints
of `flax.serialization`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization

from ..mixed_precision import DynamicLossScale
from ..recipes import DotGeneralState, QuantizerState
from ..train import StackedState

Path = tuple[str, ...]


def at(path: Path) -> str:
    """Join a path by `/`, as messages and patterns have paths."""
    return "/".join(path)


def as_dtype(place: str, leaf: Any, dtype: Any) -> Any:
    """Return a leaf of state in `dtype`; one that has it stays, and so on its devices.

    Raises:
        TypeError: the leaf has to be cast, and is no array of floats.
    """
    current = getattr(leaf, "dtype", type(leaf))
    if current == dtype:
        return leaf
    if isinstance(current, type) or not jnp.issubdtype(current, jnp.floating):
        raise TypeError(f"{place}: expected a floating dtype, got {current}")
    return leaf.astype(dtype)


def _to_state_dict(state) -> dict:
    return serialization.to_state_dict(vars(state))


def _from_state_dict(target, saved: dict):
    values = serialization.from_state_dict(vars(target), saved)
    return dataclasses.replace(target, **values)


for _cls in (DotGeneralState, QuantizerState, DynamicLossScale):
    serialization.register_serialization_state(
        _cls, _to_state_dict, _from_state_dict, override=True
    )


def _stacked_to_state_dict(state: StackedState) -> Any:
    return serialization.to_state_dict(state.unstacked())


def _stacked_from_state_dict(target: StackedState, saved: dict) -> StackedState:
    # a target of jax.eval_shape has no arrays
    collection = jax.eval_shape(StackedState.unstacked, target)
    return StackedState.stack(serialization.from_state_dict(collection, saved))


serialization.register_serialization_state(
    StackedState, _stacked_to_state_dict, _stacked_from_state_dict, override=True
)
