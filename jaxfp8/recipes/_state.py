"""Quantizer state: explicit pytrees, one leaf an array."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from ._recipe import Recipe, checked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerState:
    """What one quantizer remembers.

    Attributes:
        amax_history: f32 `(H,)`; slot 0 newest, slot 1 oldest; 0 means nothing was recorded.
        scale: f32 `(1,)`, in Flax's sense: `amax / FP8_MAX`, the `scale_inv` of the step that ran last.
        counters: None; or f32 `(3,)`, of the step that ran last: the fraction of elements that saturated, the fraction
            that was not zero and became zero, and for how many steps the scale has not changed. Where the state was
            used several times in the step, the largest. `jaxfp8.inspect.with_counters` makes them.
    """

    amax_history: jax.Array
    scale: jax.Array
    counters: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counting:
    """The counters of one quantizer in one step.

    Attributes:
        steps: f32 `(1,)`, for how many steps the scale had not changed; then with this one.
        stored: f32 `(1,)`, the scale of the step before; None once `steps` is of this one.
        fractions: f32 `(2,)`, of elements that saturated and that became zero; None at first.
    """

    steps: jax.Array
    stored: jax.Array | None
    fractions: jax.Array | None = None

    def after(self, scale, fractions) -> "Counting":
        """With a tensor that was quantized by `scale`, f32 `(1,)` in the sense of the stored one."""
        steps = jnp.where(_bits(scale) == _bits(self.stored), self.steps + jnp.float32(1), jnp.zeros_like(self.steps))
        return Counting(steps, None, fractions)


def _bits(scale):
    return jax.lax.bitcast_convert_type(scale.reshape(1), jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerRun:
    """One quantizer in one step: what its state said, and the amax it has seen so far.

    Attributes:
        history: f32 `(H,)`, moved one step: the oldest entry is gone, slot 0 waits for the amax.
        scale, scale_inv: f32 `(1,)`; scale is None where it is not needed any more.
        amax: f32 `(1,)`, 0 at first.
        is_empty: bool[], whether the history held nothing; None where that does not matter.
        counting: of a state that has counters, else None.
    """

    history: jax.Array
    scale: jax.Array | None
    scale_inv: jax.Array
    amax: jax.Array
    is_empty: jax.Array | None
    counting: Counting | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DotGeneralState:
    """The state of one FP8 product, by quantizer; None where one keeps none.

    Attributes:
        input, kernel, output_grad: of x, the kernel and the gradient of the output. Of delayed scaling each is a
            QuantizerState, of a user's quantizer what its `init` returns.
        output, input_grad: of the output and the gradient of x, which only a `CustomRecipe` quantizes.
    """

    input: Any
    kernel: Any
    output_grad: Any
    output: Any = None
    input_grad: Any = None


for _cls in (QuantizerState, DotGeneralState):
    # Programs that take or return state can be saved: jax.export.Exported.serialize.
    export.register_pytree_node_serialization(
        _cls,
        serialized_name=f"jaxfp8.{_cls.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )


def init_state(recipe: Recipe) -> DotGeneralState:
    """State of a product that has not run: of delayed scaling empty histories and scale 1; empty where none is kept.

    Raises:
        TypeError: `recipe` is none.
    """
    quantizers = checked("init_state: recipe", recipe).quantizers()
    return DotGeneralState(*(None if quantizer is None else quantizer.init() for quantizer in quantizers))


def map_variables(
    recipe: Recipe, function: Callable[..., Any], has: Callable[[str], bool] = lambda name: False
) -> DotGeneralState:
    """`init_state(recipe)` with `function(name, leaf)` in place of each leaf; names are those of Flax variables.

    A leaf of the quantizer of `input` is called `input_<its name>`, in a custom recipe `linear_input_<its name>`; a
    state that is an array alone `input_state`. A state of delayed scaling has counters where `has(name)` says so.
    """
    initial = init_state(recipe)
    fields = [field.name for field in dataclasses.fields(initial)]

    def of(operand, state):
        def leaf(path, value):
            names = (str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)
            return function("_".join((operand, *names)) if path else f"{operand}_state", value)

        if isinstance(state, QuantizerState) and has(f"{operand}_counters"):
            state = dataclasses.replace(state, counters=jnp.zeros((3,), jnp.float32))
        return jax.tree_util.tree_map_with_path(leaf, state)

    pairs = zip(fields, recipe.operands, strict=False)  # stock recipes have no quantizers of results
    states = {field: of(operand, getattr(initial, field)) for field, operand in pairs}
    return DotGeneralState(**dict.fromkeys(fields) | states)
