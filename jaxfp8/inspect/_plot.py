"""plot: draw amax and scale of every quantizer over the steps of a run."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._summary import rows_of

# Axes with more lines than this get no legend, which would hide the lines.
_MOST_LABELS = 16
_OPERANDS = ("input", "kernel", "output_grad")


def plot(histories: Mapping[str, jax.typing.ArrayLike] | Sequence[Any], path: str | os.PathLike | None = None) -> Any:
    """Plot amaxes and scales over steps; one row of axes for inputs, kernels and gradients each.

        figure = jaxfp8.inspect.plot([state0, state1, state2], "fp8.png")

    Args:
        histories: a list of variable trees, one for each step, as `jaxfp8.inspect.summary` takes them; the plot has the
            newest amax and the scale of each quantizer. Or a dict name -> array: `(steps,)`, or `(steps, H)` with the
            newest entry in slot 0, whose maximum is drawn too, dashed. Arrays whose name ends in `scale` or `scale_inv`
            go to the right axes, other arrays to the left, as amaxes.
        path: the file for `figure.savefig`; None writes no file.

    Returns:
        A `matplotlib.figure.Figure`, which no backend of pyplot holds.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `histories` is neither a dict nor a list.
        ValueError: `histories` is empty, an array has another rank, or the trees differ in their quantizers.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("inspect.plot: needs matplotlib; install it: pip install matplotlib") from error
    # 1. Collect the lines. 2. Give each group a row of axes, and each name a color.
    lines = _lines_of_dict(histories) if isinstance(histories, dict) else _lines_of_trees(histories)
    groups = sorted({group for group, *_ in lines}, key=lambda group: (*_OPERANDS, group).index(group))
    figure = Figure(figsize=(12, 3.2 * len(groups) + 0.6), layout="constrained")
    axes = dict(zip(groups, figure.subplots(len(groups), 2, squeeze=False, sharex=True), strict=True))
    colors = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(name for _, _, name, *_ in lines))}
    for group, is_scale, name, values, dashed in lines:
        label = None if dashed else name
        style = "--" if dashed else "-"
        drawn = np.where(values > 0, values, np.nan)  # 0 means that nothing was recorded; a log scale has no 0
        axes[group][int(is_scale)].plot(drawn, style, color=colors[name], linewidth=1, label=label)
    for group, pair in axes.items():
        for axis, title in zip(pair, ("amax", "scale"), strict=True):
            axis.set(title=f"{title} of {group}" if group else title, yscale="log")
            axis.grid(alpha=0.25)
            if 0 < len(axis.get_legend_handles_labels()[1]) <= _MOST_LABELS:
                axis.legend(frameon=False, fontsize="x-small")
    for axis in axes[groups[-1]]:
        axis.set_xlabel("step")
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _lines_of_dict(histories) -> list[tuple]:
    """Return a tuple `(group, whether a scale, name, values (steps,), whether dashed)` for each line."""
    lines = []
    for name, values in histories.items():
        values = np.asarray(jax.device_get(values), np.float64)
        if values.ndim not in (1, 2):
            raise ValueError(f"plot: histories[{name!r}]: expected (steps,) or (steps, H), got {values.shape}")
        is_scale = str(name).endswith(("scale", "scale_inv"))
        # A history gives two lines: its newest amax and, dashed, its largest.
        newest = values if values.ndim == 1 else values[:, 0]
        lines.append(("", is_scale, str(name), newest, False))
        if values.ndim == 2 and values.shape[1] > 1:
            lines.append(("", is_scale, str(name), values.max(axis=1), True))
    if not lines:
        raise ValueError("plot: histories: expected at least one array, got an empty dict")
    return lines


def _lines_of_trees(trees) -> list[tuple]:
    if not isinstance(trees, (list, tuple)):
        raise TypeError(
            f"plot: histories: expected a dict of arrays or a list of variable trees, got {type(trees).__name__}; one "
            "tree alone has one step: see jaxfp8.inspect.summary"
        )
    steps = [rows_of(f"plot: histories[{i}]", tree) for i, tree in enumerate(trees)]
    if not steps:
        raise ValueError("plot: histories: expected at least one tree, got an empty list")
    # A line follows one quantizer over the steps, so all trees need the same quantizers in one order.
    names = [[row["name"] for row in rows] for rows in steps]
    if any(step_names != names[0] for step_names in names):
        raise ValueError("plot: histories: expected trees with the same quantizers, got others after the first")
    lines = []
    for name, *rows in zip(names[0], *steps, strict=True):
        # An operand has a row of axes; a quantizer of another name goes to the row without a title.
        named = re.fullmatch(rf"(?:(.*)/)?({'|'.join(_OPERANDS)})(\[.*\])?", name)
        layer, group, index = named.groups(default="") if named else (name, "", "")
        for is_scale, figure in enumerate(("newest", "scale")):
            values = np.array([row[figure] for row in rows], np.float64)
            lines.append((group, is_scale, layer + index, values, False))
    return lines
