"""summary: show the step just run, from the state of every quantizer."""

from typing import Any

import jax
import numpy as np

from .._jax._table import member, table
from ..numerics import FP8_DTYPES, fp8_max
from ..recipes import _below_zero, _state_tree
from ..train import unstack_state
from ._rows import Rows

_FP8_MAX = np.array(list(map(fp8_max, FP8_DTYPES)))
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
)
_SCREEN = 40  # the most lines of a table


class Summary(Rows):
    """The quantizers of a model; `str` and `repr` are a table of them.

    Below the table, quantizers whose state is below zero are named, with the causes:
    their products are NaN.

    Of more than 40 quantizers the table has the 40 worst, as `summary(worst=40)`.

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
    """

    def __repr__(self) -> str:
        more = len(self.rows) - _SCREEN
        shown = []
        for row in self.rows if more <= 0 else _worst(self.rows, _SCREEN):
            heads = {"quantizer": row["name"], "amax": row["newest"]}
            shown.append(row | heads | {"filled": f"{row['filled']}/{row['length']}"})
        text = table(shown, _COLUMNS, ".4g", right=1)
        if more > 0:
            text += f"\nand {more} more, which are better"
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
        jax.errors.TracerArrayConversionError: the function is called inside of jit,
            where `jaxfp8.inspect.measure` works.
    """
    rows = []
    for quantizer, *state in quantizers("summary: variables", variables):
        history, scale_inv = (np.asarray(x, np.float64) for x in jax.device_get(state))
        for index in np.ndindex(history.shape[:-1]):
            name = quantizer + member(index)
            rows.append(_row(name, history[index], float(scale_inv[index][0])))
    return Summary(rows if worst is None else _worst(rows, worst))


def _worst(rows, count: int) -> list[dict[str, Any]]:
    """Return the worst rows, the worst first."""

    def badness(row):
        is_bad = not (row["scale"] or 0) > 0 or row["filled"] == 0
        return is_bad, row["growth"] or 0

    return sorted(rows, key=badness, reverse=True)[:count]


def _row(name, history, scale_inv) -> dict[str, Any]:
    recorded = np.where(np.isfinite(history) & (history > 0), history, 0)
    before = recorded[1:].max(initial=0)
    entries = recorded[recorded > 0].tolist()
    newest = float(history[0]) if entries else None
    least = float(np.nan_to_num([*history, scale_inv]).min())
    scale = follows = None
    if least < 0:
        scale, follows = np.nan, "below zero"
    elif 0 < scale_inv < np.inf:
        scale = 1 / scale_inv
        follows = _origin(recorded, scale_inv)
    return {
        "name": name,
        "scale": scale,
        "scale_inv": scale_inv,
        "newest": newest,
        "max": max(entries, default=None),
        "min": min(entries, default=None),
        "filled": len(entries),
        "length": history.size,
        "peak": None if newest is None or scale is None else newest * scale,
        "growth": float(recorded[0] / before) if recorded[0] and before else None,
        "follows": follows,
        "least": least,
    }


def _origin(recorded, scale_inv) -> str | None:
    """Return the entry that a scale follows, of the window after its step.

    The step just run wrote slot 0 and took its scale from the other slots: the last one
    is the amax of the step before.
    """
    before = recorded[1:]
    largest = before.max(initial=0)
    if largest == 0:
        # A window of one entry has dropped the amax of its scale.
        if scale_inv != 1 and recorded.size == 1 and recorded[0]:
            return "dropped"
        return "unit" if scale_inv == 1 else None
    # A scale_inv that is amax / FP8_MAX of an entry follows that entry: the largest, or
    # the newest before this step.
    if _is_scale_of(largest, scale_inv):
        return "max"
    if _is_scale_of(before[-1], scale_inv):
        return "most_recent"
    is_larger = scale_inv * _FP8_MAX.max() > largest
    return "dropped" if is_larger and np.all(before) else None


def _is_scale_of(amax, scale_inv) -> bool:
    """Return whether `scale_inv` is `amax / FP8_MAX * 2**margin` of one of the formats,
    for a whole margin.
    """
    if amax == 0:
        return False
    ratios = scale_inv / amax * _FP8_MAX
    return np.any(np.abs(ratios / 2.0 ** np.round(np.log2(ratios)) - 1) <= _EQUAL)


def quantizers(where: str, tree) -> list[tuple[str, Any, Any]]:
    """Return `(name, amax history [..., H], scale_inv [..., 1])` of each quantizer of a
    tree with FP8 state, in the order of the tree; those of an optimizer are left out.

    Leading dimensions count the layers of a stack. Slot 0 of a history is the newest
    one, slot 1 the oldest; 0 means that nothing was recorded.

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
        if "opt_state" in flat.paths[quantizer.positions[0]]:
            continue
        leaves = quantizer.leaves
        _state_tree.check_slots(f"{where}: {quantizer.name}", *leaves)
        collection = f"{_state_tree.OVERWRITE_WITH_GRADIENT}/"
        name = quantizer.name.rpartition(collection)[-1]
        arrays.append((name, *leaves))
    if not arrays:
        raise ValueError(
            f"{where}: expected a tree that holds FP8 state (amax_history and scale "
            f"side by side), got {jax.tree.structure(tree).num_leaves} leaves without "
            "it; only delayed scaling keeps such state"
        )
    return arrays
