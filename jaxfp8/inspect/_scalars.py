"""scalars, the state of all quantizers as a flat dict of numbers, and plot, which draws
them over a run.
"""

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax._table import member
from ..numerics import HYBRID, Format, _scaling, fp8_max
from ._summary import quantizers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of `measure`: one small array, and the names of its numbers.

    Attributes:
        values: f32 `[len(names)]`.
        names: `Dense_0/Fp8DotGeneral_0/input/scale`, ...
    """

    values: jax.Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def measure(variables: Any, fp8_format: Format = HYBRID) -> Measured:
    """Return the figures of `scalars` as one f32 array, inside of a jitted step.

        state = state.apply_gradients(grads=grads)
        return state, loss, jaxfp8.inspect.measure(state)

    The cost is a few reductions over the amax windows. The host waits for the array
    only when it calls `scalars` on the result, for example every 100 steps.

    Args:
        variables: see `jaxfp8.inspect.summary`.
        fp8_format: the recipe's format. State does not record it, and `scale_lag` needs
            its largest numbers.

    Returns:
        The `Measured`, a pytree of one array.

    Raises:
        ValueError: there is no FP8 state of delayed scaling.
    """
    return _measured("measure: variables", variables, fp8_format)


def _measured(where: str, variables, fp8_format=HYBRID) -> Measured:
    names = []
    values = []
    for quantizer, history, scale_inv in quantizers(where, variables):
        history = jnp.asarray(history, jnp.float32)
        scale_inv = jnp.asarray(scale_inv, jnp.float32)[..., 0]
        # Numbers below zero make the scale NaN. Look for them before `clean`, which
        # replaces them.
        is_bad = jnp.any(_scaling.below_zero(history), axis=-1)
        is_bad |= _scaling.below_zero(scale_inv)
        history = _scaling.clean(history)
        newest = history[..., 0]
        scale = jnp.where(is_bad, jnp.nan, 1 / scale_inv)
        is_grad = quantizer.endswith("output_grad")
        largest = fp8_max(fp8_format.backward_dtype if is_grad else fp8_format.dtype)
        before = jnp.max(history[..., 1:], axis=-1, initial=0)
        recorded = jnp.where(newest > 0, newest, jnp.nan)
        figures = {
            "scale": scale,
            "amax": newest,
            "amax_max": jnp.max(history, axis=-1),
            "peak": newest * scale,
            "growth": recorded / jnp.where(before > 0, before, jnp.nan),
            "scale_lag": jnp.log2(recorded * scale / largest),
        }
        # The names have the order of the flat figures: layer by layer of the stack, the
        # figures of a layer together.
        for index in np.ndindex(newest.shape):
            names += [f"{quantizer}{member(index)}/{figure}" for figure in figures]
        values.append(jnp.stack(list(figures.values()), axis=-1).reshape(-1))
    return Measured(jnp.concatenate(values), tuple(names))


def scalars(variables: Any, prefix: str = "fp8") -> dict[str, float]:
    """Return a flat dict name -> float, which clu, tensorboard, wandb and other writers
    of metrics take.

        writer.write_scalars(step, jaxfp8.inspect.scalars(measured))

    Each quantizer has these figures:

    - `scale`: the factor that quantizes; NaN where the state is below zero.
    - `amax`: that of the step just run. `amax_max`: the largest one in the window.
    - `peak`: `amax * scale`; above 448 in e4m3, or 57344 in e5m2, the tensor saturated.
    - `growth`: `amax` over the largest of the other entries of the window; NaN where
      either was not recorded.
    - `scale_lag`: `log2(peak / FP8_MAX)`, by how many powers of two the scale is too
      large for the tensor. Above 0 the step saturated; `-n` leaves the largest n powers
      of two of the format unused. NaN where no amax was recorded.

    A name is `{prefix}/Dense_0/Fp8DotGeneral_0/input/scale`. The function waits for the
    device.

    Args:
        variables: the result of `measure`, or variables as `jaxfp8.inspect.summary`
            takes them.
        prefix: the beginning of all names; an empty string adds none.

    Raises:
        ValueError: there is no FP8 state of delayed scaling.
        jax.errors.TracerArrayConversionError: the function is called inside of jit,
            where `measure` works.
    """
    measured = variables if isinstance(variables, Measured) else measure(variables)
    names = (f"{prefix}/{name}" if prefix else name for name in measured.names)
    return dict(zip(names, np.asarray(measured.values).tolist(), strict=True))


# A line of `plot`: layer, operand, member of a stack, and figure.
_LINE = re.compile(r"(.*)/(\w+)((?:\[.*)?)/(scale|amax)")
# Axes with more lines than this get no legend, which would hide the lines.
_MOST_LABELS = 16


def plot(histories: Sequence[Any], path: str | os.PathLike | None = None) -> Any:
    """Plot amaxes and scales over steps, with a row of axes for each operand.

        figure = jaxfp8.inspect.plot([state0, state1, state2], "fp8.png")

    Args:
        histories: a list of variable trees, one for each step, as
            `jaxfp8.inspect.summary` takes them; the plot has the newest amax and the
            scale of each quantizer.
        path: the file for `figure.savefig`; None writes no file.

    Returns:
        A `matplotlib.figure.Figure`, which no backend of pyplot holds.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `histories` is empty or a single tree, or the trees differ in their
            quantizers.
    """
    from matplotlib.figure import Figure

    lines = _lines(histories)
    rows = len(lines) // 2
    figure = Figure(figsize=(12, 3.2 * rows + 0.6), layout="constrained")
    all_axes = figure.subplots(rows, 2, squeeze=False, sharex=True)
    for axes, (title, by_layer) in zip(all_axes.flat, lines.items(), strict=True):
        for layer, drawn in by_layer.items():
            axes.plot(drawn, linewidth=1, label=layer)
        axes.set(title=title, xlabel="step", yscale="log")
        axes.grid(alpha=0.25)
        if len(by_layer) <= _MOST_LABELS:
            axes.legend(frameon=False, fontsize="x-small")
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _lines(histories) -> dict[str, dict[str, np.ndarray]]:
    """Return, by the title of its axes and the layer, the values `(steps,)` of a
    line.
    """
    steps = [_measured(f"plot: histories[{i}]", x) for i, x in enumerate(histories)]
    # A line follows one quantizer over the steps, so all trees need the same quantizers
    # in one order.
    different = {step.names for step in steps}
    if len(different) != 1:
        raise ValueError(
            "plot: histories: expected variable trees with the same quantizers, got "
            f"{len(steps)} trees with {len(different)} different sets of quantizers"
        )
    lines = defaultdict(dict)
    values = np.stack([step.values for step in steps], axis=-1)
    for name, over_steps in zip(*different, values, strict=True):
        if line := _LINE.fullmatch(name):
            layer, operand, index, figure = line.groups()
            # 0 means that nothing was recorded; a log scale has no 0
            drawn = np.where(over_steps > 0, over_steps, np.nan)
            lines[f"{figure} of {operand}"][layer + index] = drawn
    return lines
