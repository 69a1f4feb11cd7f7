"""scalars: the state of all quantizers as a flat dict of numbers, for whatever writes metrics."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax._table import member
from ..numerics import _scaling
from ._quantizers import quantizers

_FIGURES = ("scale", "amax", "amax_max", "peak")
_COUNTERS = ("saturated", "flushed", "steps_since_change")


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


def measure(variables: Any) -> Measured:
    """Return the figures of `scalars` as one f32 array; for the inside of a jitted step.

        state = state.apply_gradients(grads=grads)
        return state, loss, jaxfp8.inspect.measure(state)  # nothing waits for it

    A few reductions over the amax windows; the host reads the array when it calls `scalars` on it, every 100 steps
    perhaps.

    Args:
        variables: as of `jaxfp8.inspect.summary`.

    Returns:
        A pytree of one array.

    Raises:
        ValueError: there is no FP8 state of delayed scaling.
    """
    names, values = [], []
    for arrays in quantizers("measure: variables", variables):
        history = jnp.asarray(arrays.amax_history).astype(jnp.float32)
        scale_inv = jnp.asarray(arrays.scale_inv)[..., 0].astype(jnp.float32)
        # Numbers below zero make the scale NaN. Look for them before `clean`, which replaces them.
        is_bad = jnp.any(_scaling.below_zero(history), axis=-1) | _scaling.below_zero(scale_inv)
        history = _scaling.clean(history)
        scale, newest = jnp.where(is_bad, jnp.nan, 1 / scale_inv), history[..., 0]
        figures = [scale, newest, jnp.max(history, axis=-1), newest * scale]
        labels = _FIGURES
        if arrays.counters is not None:
            counters = jnp.asarray(arrays.counters).astype(jnp.float32)
            figures += [counters[..., i] for i in range(len(_COUNTERS))]
            labels += _COUNTERS
        # The names have the order of the flat figures: a layer of the stack after the other, its figures side by side.
        names += [f"{arrays.name}{member(index)}/{label}" for index in np.ndindex(arrays.stack) for label in labels]
        values.append(jnp.stack(figures, axis=-1).reshape(-1))
    return Measured(jnp.concatenate(values), tuple(names))


def scalars(variables: Any, prefix: str = "fp8") -> dict[str, float]:
    """Return a flat dict name -> float, as clu, tensorboard, wandb and the like write it.

        writer.write_scalars(step, jaxfp8.inspect.scalars(measured))

    For each quantizer `scale` (what multiplies; NaN where the state is below zero), `amax` (of the step just run),
    `amax_max` (of its window) and `peak` (`amax * scale`; above 448 in e4m3 and 57344 in e5m2 it saturated); with
    counters also `saturated`, `flushed` and `steps_since_change`. Names are
    `{prefix}/Dense_0/Fp8DotGeneral_0/input/scale`. Waits for the device.

    Args:
        variables: what `measure` gave, or variables as of `jaxfp8.inspect.summary`.
        prefix: of all names; none where it is empty.

    Raises:
        ValueError: there is no FP8 state of delayed scaling.
        TypeError: inside of jit.
    """
    measured = variables if isinstance(variables, Measured) else measure(variables)
    if isinstance(measured.values, jax.core.Tracer):
        raise TypeError(
            "scalars: variables: expected concrete arrays, got traced ones; inside of jit use jaxfp8.inspect.measure, "
            "return what it gives and call scalars on that"
        )
    names = (f"{prefix}/{name}" if prefix else name for name in measured.names)
    return dict(zip(names, np.asarray(measured.values).tolist(), strict=True))
