"""Fit state to a changed model: another history length, layers that are new in FP8; or
reset the state.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import core

from .._jax import _warnings
from ..linen._mistakes import TRANSFORMER_ENGINE_BY_HAND
from ..numerics import _scaling
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    DelayedScaling,
    FP8StateWarning,
    _below_zero,
    _state_tree,
)
from ..train import unstack_state
from ._tree import as_dtype, at

_HISTORY = "amax_history"
_COUNTERS = "_counters"  # of quantizers, in releases until 0.2


def resize_history(tree: Any, amax_history_len: int) -> Any:
    """Resize every amax history of `tree`; the newest entries are kept.

    Slot 0 is the newest entry, slot 1 the oldest and the last slot the second newest.
    So `[5, 2, 3, 4]` becomes `[5, 4]` with two slots and `[5, 0, 0, 2, 3, 4]` with six:
    new slots count as older than the oldest entry, and hold 0, which means that nothing
    was recorded.

    Args:
        tree: any tree with history f32 `(..., H)` and scale f32 `(..., 1)` side by
            side: a variables dict, a TrainState, an NNX state, a `DotGeneralState`.
        amax_history_len: the new length, at least 1, which the recipe has to have too.

    Returns:
        `tree` with histories `[..., amax_history_len]`.

    Raises:
        ValueError: the length is below 1, the tree has no history, or a history and its
            scale do not fit.
        TypeError: the length is not an int.
    """
    DelayedScaling(amax_history_len=amax_history_len)  # the rule of lengths

    def resized(history, scale):
        return _resize(history, amax_history_len), scale

    return _map_quantizers("resize_history", _state_tree.flatten(tree), resized)


def _map_quantizers(where, flat, function):
    """Return a tree in which `function(history, scale)` replaces history and scale of
    each quantizer.
    """
    # Without this check a tree without histories would come back unchanged, and the
    # error would come from the model.
    if not flat.quantizers:
        raise ValueError(
            f"{where}: tree: expected amax_history and scale side by side, got a tree "
            "without them; pass the variables, or the state of delayed scaling"
        )
    values = {}
    for quantizer in flat.quantizers:
        pair = list(map(jnp.asarray, quantizer.leaves))
        _state_tree.check_slots(f"{where}: tree: {quantizer.name}", *pair)
        values |= zip(quantizer.positions, function(*pair), strict=True)
    return flat.replace(values)


def _resize(history, length):
    """Resize a history `(..., H)` to `length` slots."""
    excess = history.shape[-1] - length
    # the oldest slots begin at slot 1
    if excess > 0:
        return jnp.delete(jnp.asarray(history), slice(1, 1 + excess), -1)
    return jnp.insert(jnp.asarray(history), np.ones(-excess, int), 0, -1)


def merge_state(
    variables: Mapping[str, Any], restored: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge a checkpoint's variables with FP8 state that fits the model as it is now.

    All other collections come from the checkpoint, where it has them. A module whose
    state the checkpoint lacks (a bfloat16 checkpoint, a layer that is new in FP8) keeps
    its initial state, and a history of another length is resized. Counters, which
    releases until 0.2 had, are left out. Numbers that are not finite are kept: a step
    reads them as if nothing was recorded.

    Args:
        variables: the variables of the model as it is now, from `model.init(...)`.
        restored: the variables of the checkpoint, in the shapes of the checkpoint.

    Returns:
        Nested dicts; state is float32.

    Raises:
        ValueError: the checkpoint has state for a module that the model does not have
            in FP8, or that it stacks differently; a history without its scale, or a
            scale without its history; or a tree is that of an NNX model.
        TypeError: an argument is not a dict, or a leaf is not a floating array.
    """
    where = "merge_state"
    flats = []
    for name, value in (("variables", variables), ("restored", restored)):
        if not isinstance(value, Mapping):
            raise TypeError(
                f"{where}: {name}: expected a dict of variables, got "
                f"{type(value).__name__}"
            )
        flat = _state_tree.flatten(unstack_state(value))
        if OVERWRITE_WITH_GRADIENT not in value and flat.quantizers:
            raise ValueError(
                f"{where}: {name}: expected FP8 state in the collection "
                f"{OVERWRITE_WITH_GRADIENT} of Linen, got it beside the parameters, "
                "as NNX keeps it; there call nnx.update(model, restored), after "
                "resize_history(restored, amax_history_len) if histories have another "
                "length"
            )
        flats.append(flat)
    model, given = flats[0], flats[1].by_path()
    # The checkpoint's state takes the place of the model's, leaf by leaf; its other
    # collections replace those of the model.
    positions = {path: i for i, path in enumerate(model.paths)}
    fitted = {}
    for path, leaf in given.items():
        place = f"{where}: restored: {at(path)}"
        if path[0] != OVERWRITE_WITH_GRADIENT:
            continue
        if path in positions:
            i = positions[path]
            is_history = path[-1].endswith(_HISTORY)
            fitted[i] = _fit(place, leaf, model.leaves[i], is_history)
        elif not path[-1].endswith(_COUNTERS):
            modules = {at(p[1:-1]) for p in positions if p[0] == path[0]}
            way_out = "state of Flax goes through from_flax"
            if "/TEWrapper_dot_general_" in at(path):
                way_out = TRANSFORMER_ENGINE_BY_HAND
            raise ValueError(
                f"{place}: the model has no such state, it has {sorted(modules)}; "
                f"{way_out}; drop from the checkpoint modules that the model no longer "
                "has in FP8"
            )
    for quantizer in model.quantizers:
        if len(fitted.keys() & quantizer.positions) == 1:
            raise ValueError(
                f"{where}: restored: {quantizer.name}: expected its amax_history and "
                "its scale, got one of them; restore both, or drop both to begin with "
                "the model's"
            )
    merged = {**variables, **restored}
    if OVERWRITE_WITH_GRADIENT in variables:
        collections = core.unfreeze(model.replace(fitted))
        merged[OVERWRITE_WITH_GRADIENT] = collections[OVERWRITE_WITH_GRADIENT]
    return merged


def _fit(place, leaf, initial, is_history: bool):
    """Return a leaf of state of the checkpoint in the shape and dtype of the model's,
    with its length of histories.
    """
    leaf = as_dtype(place, leaf, initial.dtype)
    if leaf.shape == initial.shape:
        return leaf
    if is_history and leaf.shape[:-1] == initial.shape[:-1] and leaf.size:
        return _resize(leaf, initial.shape[-1])
    raise ValueError(
        f"{place}: expected the model's shape {tuple(initial.shape)}"
        f"{' up to the history length' if is_history else ''}, got "
        f"{tuple(leaf.shape)}; give the variables of a model as wide as that of the "
        "checkpoint"
    )


def reset_state(tree: Any, *, only_bad: bool = False) -> Any:
    """Reset the state of delayed scaling to what `init` makes: empty histories,
    scale 1.

        variables = jaxfp8.convert.reset_state(variables, only_bad=True)
        nnx.update(model, jaxfp8.convert.reset_state(nnx.state(model), only_bad=True))

    An optimizer that steps on state makes numbers below zero, which a step of delayed
    scaling never makes; the scale of such a quantizer is NaN (docs/numerics.md). Repair
    the training loop first, and the parameters if they are NaN.

    Args:
        tree: any tree with history f32 `(..., H)` and scale f32 `(..., 1)` side by
            side: a variables dict, a TrainState, an NNX state, a `DotGeneralState`.
            States of users' own quantizers stay as they are.
        only_bad: reset only the rows (a quantizer, or one layer of a stack) with an
            entry or a scale below zero.

    Returns:
        `tree` with state that was reset; other leaves are those of `tree`.

    Raises:
        ValueError: the tree has no state of delayed scaling.
        FP8StateWarning: quantizers are below zero: their names, and why. Not inside of
            `jit`.
    """
    flat = _state_tree.flatten(tree)
    if below_zero := _below_zero.describe(flat):
        _warnings.warn(f"reset_state: tree: {below_zero}", FP8StateWarning)

    def reset(history, scale):
        # One slot below zero gives its whole row a NaN scale, so the row is reset as a
        # whole.
        is_reset = jnp.any(_scaling.below_zero(history), -1, keepdims=True)
        is_reset |= _scaling.below_zero(scale) | (not only_bad)
        return jnp.where(is_reset, 0, history), jnp.where(is_reset, 1, scale)

    return _map_quantizers("reset_state", flat, reset)
