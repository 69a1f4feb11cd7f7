"""scalars: return the state of all quantizers as a flat dict of numbers, for writers of metrics."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax._table import member
from ..numerics import HYBRID, Format, _scaling, fp8_max
from ._quantizers import quantizers

_FIGURES = ("scale", "amax", "amax_max", "peak", "growth", "scale_lag")


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

    The cost is a few reductions over the amax windows. The host waits for the array only when it calls `scalars` on the
    result, for example every 100 steps.

    Args:
        variables: see `jaxfp8.inspect.summary`.
        fp8_format: the recipe's format. State does not record it, and `scale_lag` needs its largest numbers.

    Returns:
        The `Measured`, a pytree of one array.

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
        is_grad = arrays.name.endswith("output_grad")
        largest = fp8_max(fp8_format.backward_dtype if is_grad else fp8_format.dtype)
        before = jnp.max(history[..., 1:], axis=-1, initial=0)
        growth = jnp.where((newest > 0) & (before > 0), newest / before, jnp.nan)
        scale_lag = jnp.where(newest > 0, jnp.log2(newest * scale / largest), jnp.nan)
        figures = [scale, newest, jnp.max(history, axis=-1), newest * scale, growth, scale_lag]
        # The names have the order of the flat figures: layer by layer of the stack, the figures of a layer together.
        names += [f"{arrays.name}{member(index)}/{label}" for index in np.ndindex(arrays.stack) for label in _FIGURES]
        values.append(jnp.stack(figures, axis=-1).reshape(-1))
    return Measured(jnp.concatenate(values), tuple(names))


def scalars(variables: Any, prefix: str = "fp8") -> dict[str, float]:
    """Return a flat dict name -> float, which clu, tensorboard, wandb and other writers of metrics take.

        writer.write_scalars(step, jaxfp8.inspect.scalars(measured))

    Each quantizer has these figures:

    - `scale`: the factor that quantizes; NaN where the state is below zero.
    - `amax`: that of the step just run. `amax_max`: the largest one in the window.
    - `peak`: `amax * scale`; above 448 in e4m3, or 57344 in e5m2, the tensor saturated.
    - `growth`: `amax` over the largest of the other entries of the window; NaN where either was not recorded.
    - `scale_lag`: `log2(peak / FP8_MAX)`, by how many powers of two the scale is too large for the tensor. Above 0 the
      step saturated; `-n` leaves the largest n powers of two of the format unused. NaN where no amax was recorded.

    A name is `{prefix}/Dense_0/Fp8DotGeneral_0/input/scale`. The function waits for the device.

    Args:
        variables: the result of `measure`, or variables as `jaxfp8.inspect.summary` takes them.
        prefix: the beginning of all names; an empty string adds none.

    Raises:
        ValueError: there is no FP8 state of delayed scaling.
        TypeError: the function is called inside of jit.
    """
    measured = variables if isinstance(variables, Measured) else measure(variables)
    if isinstance(measured.values, jax.core.Tracer):
        raise TypeError(
            "scalars: variables: expected concrete arrays, got traced ones; inside of jit use jaxfp8.inspect.measure, "
            "return what it gives and call scalars on that"
        )
    names = (f"{prefix}/{name}" if prefix else name for name in measured.names)
    return dict(zip(names, np.asarray(measured.values).tolist(), strict=True))
