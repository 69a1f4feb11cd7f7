"""DynamicLossScale: the factor that keeps the gradients of a float16 backward pass
above zero and below infinity.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..dot import promoted
from ..numerics import _scaling
from ..train import _sharing
from ._floats import is_inexact, map_outside_state

_UNSET = object()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "good_steps"],
    meta_fields=["growth_factor", "backoff_factor", "growth_interval"],
)
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows after a number of finite steps and shrinks when a
    gradient is not finite.

        value_and_grad = mixed_precision.value_and_grad(loss_fn, loss_scale)
        loss, grads = value_and_grad(variables, batch)
        finite = mixed_precision.all_finite(grads)
        stepped = train.apply_gradients(grads=grads)
        train = mixed_precision.select(finite, stepped, train)
        loss_scale = loss_scale.adjust(finite)

    `adjust` returns the loss scale of the next step; call it once for each step of the
    optimizer:

        finite:      good_steps + 1; at growth_interval value *= growth_factor and
                     good_steps = 0
        not finite:  value *= backoff_factor, good_steps = 0

    `value` stays within [2**-126, 2**126], so that neither `value` nor its inverse is
    ever 0 or infinite. With powers of two, such as the defaults, scaling and unscaling
    do not round.

    A DynamicLossScale is a pytree of the arrays `value` and `good_steps`; its other
    fields are static. No method changes the object.

    Args:
        init_scale: the first `value`, from 2**-126 to 2**126.
        growth_factor: the factor by which the value grows, above 1.
        backoff_factor: the factor by which the value shrinks, between 0 and 1.
        growth_interval: the number of finite steps in a row after which the value
            grows.

    Attributes:
        value: f32[], the factor on the loss.
        good_steps: i32[], the number of finite steps since the value last changed.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: an argument is not a number.
    """

    init_scale: dataclasses.InitVar[float] = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    value: Any = dataclasses.field(default=_UNSET, kw_only=True)
    good_steps: Any = dataclasses.field(
        default_factory=lambda: jnp.int32(0), kw_only=True
    )

    def __post_init__(self, init_scale: float) -> None:
        # JAX unflattens pytrees through this method, with tracers or placeholders as
        # values: only the `init_scale` of a user is checked and converted.
        if self.value is _UNSET:
            _check(
                init_scale,
                "init_scale",
                "a number from 2**-126 to 2**126",
                lambda scale: _scaling.MIN_SCALE <= scale <= _scaling.MAX_SCALE,
            )
            object.__setattr__(self, "value", jnp.float32(init_scale))
        _check(
            self.growth_factor,
            "growth_factor",
            "a number above 1, and finite, in float32",
            lambda factor: 1 < np.float32(factor) < np.inf,
        )
        _check(
            self.backoff_factor,
            "backoff_factor",
            "a number between 0 and 1 in float32",
            lambda factor: 0 < np.float32(factor) < 1,
        )
        _check(
            self.growth_interval,
            "growth_interval",
            "a positive integer below 2**31",
            lambda count: 1 <= count < 2**31 and count == int(count),
        )

    def scale(self, tree: Any) -> Any:
        """Multiply `tree` by `value`, in f32 or wider: for the loss, before the
        gradient is taken.

        Compute the loss itself in f32 too (`Policy.op`): the gradient of a float16 loss
        starts as `value` in float16, which is infinite from 65520 on. FP8 state, and
        leaves that are not floats, are returned as they are.

        Args:
            tree: a loss, or any tree.
        """
        return _times(self.value, tree)

    def unscale(self, tree: Any) -> Any:
        """Divide `tree` by `value`, in f32 or wider: for gradients, before clipping and
        the optimizer.

        The result is `leaf * round(1 / value)`, with the inverse rounded to f32. It is
        not in float16, in which small gradients would become 0 again. FP8 state, which
        is not a gradient, and leaves that are not floats are returned as they are.

        Args:
            tree: gradients of a loss that `scale` scaled: a variables dict, an NNX
                state, any tree.
        """
        value = jnp.asarray(self.value, jnp.float32)
        return _times(_scaling.round_quotient(jnp.ones_like(value), value), tree)

    def adjust(self, finite: jax.typing.ArrayLike) -> "DynamicLossScale":
        """Return the loss scale for the next step.

        Call `adjust` once for each step of the optimizer, not for each microbatch.

        Args:
            finite: bool[], whether the gradients were finite, as `all_finite` says.

        Raises:
            TypeError: `finite` is not a boolean.
        """
        if jnp.result_type(finite) != jnp.bool_:
            raise TypeError(
                "DynamicLossScale.adjust: finite: expected a boolean, got "
                f"{jnp.result_type(finite)}; pass "
                "mixed_precision.all_finite(gradients)"
            )
        # Grow after enough good steps, shrink at once; keep the value and its inverse
        # normal floats.
        value = jnp.asarray(self.value, jnp.float32)
        good_steps = jnp.asarray(self.good_steps, jnp.int32) + 1
        grows = good_steps >= self.growth_interval
        grown = value * np.float32(self.growth_factor)
        grown = jnp.minimum(grown, np.float32(_scaling.MAX_SCALE))
        shrunk = value * np.float32(self.backoff_factor)
        shrunk = jnp.maximum(shrunk, np.float32(_scaling.MIN_SCALE))
        value = jnp.where(finite, jnp.where(grows, grown, value), shrunk)
        good_steps = jnp.where(finite & ~grows, good_steps, np.int32(0))
        return dataclasses.replace(self, value=value, good_steps=good_steps)


def value_and_grad(
    loss_fn: Callable[..., Any],
    loss_scale: DynamicLossScale,
    argnums: Any = 0,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Differentiate as `jaxfp8.value_and_grad` does, scaling the loss and unscaling the
    gradients.

    Args:
        loss_fn: returns a scalar loss, or `(loss, aux)` with `has_aux`.
        loss_scale: the scale; `adjust` is left to the caller.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.

    Returns:
        A function of the same arguments that returns `(loss, gradients)`, with aux
        `((loss, aux), gradients)`. The loss is that of `loss_fn`, without the scale.
        Gradients are unscaled, in f32 or wider; the next FP8 state among them is not
        scaled at all.
    """

    def scaled(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        # Return the unscaled loss as well: dividing the scaled loss would give infinity
        # where only scaling overflows.
        return loss_scale.scale(out[0] if has_aux else out), out

    scaled_and_gradients = _sharing.value_and_grad(scaled, argnums, has_aux=True)

    @functools.wraps(loss_fn)
    def value_and_gradients(*args, **kwargs):
        (_, out), gradients = scaled_and_gradients(*args, **kwargs)
        return out, loss_scale.unscale(gradients)

    return value_and_gradients


def _times(factor, tree):
    """Multiply the floats of a tree, but FP8 state, in f32 or wider."""

    def times(leaf):
        # In float16 the product would overflow, and the quotient would flush to zero
        # again.
        dtype = promoted(leaf.dtype, jnp.float32)
        return leaf.astype(dtype) * jnp.asarray(factor).astype(dtype)

    return map_outside_state(times, tree, is_inexact)


def _check(value, name, expected, is_right):
    is_array = jnp.issubdtype(getattr(value, "dtype", bool), np.number)
    if not (is_array or isinstance(value, numbers.Real)):
        raise TypeError(f"DynamicLossScale: {name}: expected a number, got {value!r}")
    if not is_right(value):
        raise ValueError(
            f"DynamicLossScale: {name}: expected {expected}, got {value!r}"
        )
