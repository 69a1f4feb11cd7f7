"""summary: show the step just run, from the state of every quantizer."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax._table import member, table
from ..numerics import FP8_DTYPES, fp8_max
from ..recipes import _below_zero, _state_tree
from ..train import unstack_state

# Amaxes and scales are f32: a quotient that was rounded twice is off by less.
_EQUAL = 4 * 2**-24
_COLUMNS = (
    "quantizer",
    "scale",
    "amax",
    "max",
    "min",
    "filled",
    "peak",
    "follows",
    "steps",
)
# A table of more rows than a screen holds has a line for each group.
_SCREEN = 40


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The quantizers of a model; `str` and `repr` are a table of them.

    Below the table, quantizers whose state is below zero are named, with the causes:
    their products are NaN.

    The table of more than 40 quantizers has a line for each group of quantizers whose
    names differ in numbers alone, with the worst quantizer of the group:
    `block_*/up/Fp8DotGeneral_*/input x32`.

    Attributes:
        rows: a dict for each quantizer, and for each layer of a stack:

            - `name`: `Dense_0/Fp8DotGeneral_0/input`; `[i]` after the name is the layer
              of a stack.
            - `scale`, `scale_inv`: the factors of the step just run; `scale` quantizes,
              `scale_inv` dequantizes.
            - `newest`, `max`, `min`, `filled`, `length`: the amax window: its newest
              entry, the largest and the smallest of the `filled` entries, and the
              number of slots. Amaxes are None where nothing was recorded.
            - `peak`: `newest * scale`, the largest magnitude before rounding. Above the
              largest number of the format (448 for e4m3, 57344 for e5m2) the tensor
              saturated; far below, small numbers were flushed. None where `newest` or
              `scale` is None.
            - `growth`: `newest` over the largest other entry. Above 1 the step
              saturated, if the scale follows the maximum without a margin. None where
              there is no other entry.
            - `follows`: the entry that the scale comes from: `"max"`, `"most_recent"`,
              `"dropped"` (an entry that has just left a full window), `"unit"` (scale
              1, no entry before), `"below zero"` (an optimizer has stepped on the
              state, so the scale is NaN). None where the scale comes from no entry of
              this window: it is that of a custom algorithm, or something else wrote the
              state.
            - `least`: the smallest number of the state, history and scale.
            - `steps_since_change`: for how many steps the scale has not changed; 0 if
              it changed in the step just run. None where the scale does not follow the
              maximum of the window.
    """

    rows: list[dict[str, Any]]

    def __repr__(self) -> str:
        rows = self.rows
        if len(rows) > _SCREEN:
            rows = _groups(rows)
        shown = []
        for row in rows:
            heads = {"quantizer": row["name"], "amax": row["newest"]}
            heads["filled"] = f"{row['filled']}/{row['length']}"
            shown.append(row | heads | {"steps": row["steps_since_change"]})
        text = table(shown, _COLUMNS, ".4g")
        below_zero = {
            row["name"]: row["least"] for row in self.rows if row["least"] < 0
        }
        if below_zero:
            text += f"\n\n{_below_zero.message(below_zero)}{_below_zero.REPAIR}"
        return text


def summary(variables: Any, *, worst: int | None = None) -> Summary:
    """Summarize the FP8 state of a model after a step: scale and amax window.

        print(jaxfp8.inspect.summary(state))
        print(jaxfp8.inspect.summary(state, worst=10))

    `summary` only reads the state, so it adds nothing to a training step.
    `jaxfp8.inspect.count` counts the elements that saturate and that become zero.

    Args:
        variables: Linen variables, a TrainState, an NNX model or state, a
            DotGeneralState, or any tree with these inside; concrete arrays. The state
            of an optimizer is left out.
        worst: the number of quantizers to keep, the worst first: scales that are not
            positive and quantizers that have recorded nothing, whose scale says
            nothing; then the largest growth. None keeps all.

    Returns:
        The `Summary`, in the order of the tree, or the worst first.

    Raises:
        ValueError: there is no FP8 state of delayed scaling.
        TypeError: the function is called inside of jit, where `jaxfp8.inspect.measure`
            works.
    """
    rows = rows_of("summary: variables", variables)
    if worst is not None:
        rows = sorted(rows, key=_badness, reverse=True)[:worst]
    return Summary(rows)


def rows_of(where: str, variables) -> list[dict[str, Any]]:
    """Return the rows of a `Summary`; `where` names the function and the argument, for
    messages.
    """
    rows = []
    for arrays in quantizers(where, variables):
        state = arrays.amax_history, arrays.scale_inv
        if any(isinstance(leaf, jax.core.Tracer) for leaf in state):
            raise TypeError(
                f"{where}: expected concrete arrays, got tracers; in jit use "
                "jaxfp8.inspect.measure"
            )
        history, scale_inv = (np.asarray(x, np.float64) for x in jax.device_get(state))
        for index in np.ndindex(arrays.stack):
            name = arrays.name + member(index)
            rows.append(_row(name, history[index], float(scale_inv[index][0])))
    return rows


def _badness(row) -> tuple:
    is_bad = not (row["scale"] or 0) > 0 or row["filled"] == 0
    return is_bad, row["growth"] or 0


def _groups(rows) -> list[dict[str, Any]]:
    """Return the worst row of each group of names that differ in numbers alone, under
    the name of the group.
    """
    groups = {}
    for row in rows:
        groups.setdefault(re.sub(r"\d+", "*", row["name"]), []).append(row)
    worst = []
    for name, group in groups.items():
        row = max(group, key=_badness)
        if len(group) > 1:
            row = row | {"name": f"{name} x{len(group)}"}
        worst.append(row)
    return worst


def _row(name, history, scale_inv) -> dict[str, Any]:
    is_recorded = np.isfinite(history) & (history > 0)
    entries = history[is_recorded]
    before = history[1:][is_recorded[1:]].max(initial=0)
    newest = float(history[0]) if entries.size else None
    scale = follows = steps = None
    if np.any(history < 0) or scale_inv < 0:
        scale, follows = np.nan, "below zero"
    elif np.isfinite(scale_inv) and scale_inv > 0:
        scale = 1 / scale_inv
        follows, steps = _origin(history, scale_inv)
    return {
        "name": name,
        "scale": scale,
        "scale_inv": scale_inv,
        "newest": newest,
        "max": float(entries.max()) if entries.size else None,
        "min": float(entries.min()) if entries.size else None,
        "filled": int(entries.size),
        "length": int(history.size),
        "peak": None if newest is None or scale is None else newest * scale,
        "growth": float(history[0] / before) if is_recorded[0] and before else None,
        "follows": follows,
        "least": float(min(np.nan_to_num(history).min(), np.nan_to_num(scale_inv))),
        "steps_since_change": steps,
    }


def _origin(history, scale_inv) -> tuple[str | None, int | None]:
    """Return `(follows, steps since the scale changed)` of a scale and the window after
    its step.

    The step just run wrote slot 0 and took its scale from the other slots: `by_age[0]`
    is the amax of the step before.
    """
    # A scale_inv that is amax / FP8_MAX of an entry follows that entry: the largest, or
    # the newest before this step.
    by_age = np.where(np.isfinite(history) & (history > 0), history, 0)[:0:-1]
    largest = by_age.max(initial=0)
    if largest == 0:
        # A window of one entry has dropped the amax of its scale.
        if history.size == 1 and history[0] > 0 and scale_inv != 1:
            return "dropped", None
        return "unit" if scale_inv == 1 else None, None
    if _is_scale_of(largest, scale_inv):
        return "max", int(np.flatnonzero(by_age == largest)[-1])
    if _is_scale_of(by_age[0], scale_inv):
        return "most_recent", None
    if np.all(by_age > 0) and scale_inv * max(map(fp8_max, FP8_DTYPES)) > largest:
        return "dropped", None
    return None, None


def _is_scale_of(amax, scale_inv) -> bool:
    """Return whether `scale_inv` is `amax / FP8_MAX * 2**margin` of one of the formats,
    for a whole margin.
    """
    if amax == 0:
        return False
    ratios = scale_inv / amax * np.array(list(map(fp8_max, FP8_DTYPES)))
    return np.any(np.abs(ratios / 2.0 ** np.round(np.log2(ratios)) - 1) <= _EQUAL)


class Arrays(NamedTuple):
    """The state of one quantizer, or of a stack of quantizers, with the slots moved to
    the last axis.

    Attributes:
        name: the path below the state collection: `Dense_0/Fp8DotGeneral_0/input`.
        amax_history: `[..., H]`, slot 0 newest, slot 1 oldest; 0 means nothing was
            recorded.
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
    """Return the quantizers of a tree with FP8 state, in the order of the tree, without
    those in an optimizer's state.

    Args:
        where: the function and the argument, for messages.
        tree: Linen variables, a TrainState, an NNX model or state, a DotGeneralState,
            or any tree with these inside.

    Raises:
        ValueError: the tree has no quantizer, or the shapes of a history and its scale
            do not fit.
    """
    flat = _state_tree.flatten(unstack_state(tree))
    arrays = []
    for quantizer in flat.quantizers:
        # Moments that an optimizer keeps for state have the names of state too, but are
        # not quantizers.
        if "opt_state" in flat.paths[quantizer.amax_history]:
            continue
        leaves = [flat.leaves[i] for i in quantizer.positions()]
        axis = _state_tree.slot_axis(f"{where}: {quantizer.name}", *leaves)
        # Transforms stack along any axis; here the slots go last.
        if axis not in (-1, leaves[0].ndim - 1):
            leaves = [jax.numpy.moveaxis(leaf, axis, -1) for leaf in leaves]
        collection = f"/{_state_tree.OVERWRITE_WITH_GRADIENT}/"
        name = f"/{quantizer.name}".partition(collection)[2] or quantizer.name
        arrays.append(Arrays(name, *leaves))
    if not arrays:
        raise ValueError(
            f"{where}: expected a tree that holds FP8 state (amax_history and scale "
            f"side by side), got {jax.tree.structure(tree).num_leaves} leaves without "
            "it; only delayed scaling keeps such state"
        )
    return arrays
