"""Quantizer state: explicit pytrees whose leaves are arrays."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from ._recipe import ByQuantizer, Recipe, checked


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerState:
    """The state of delayed scaling for one tensor.

    Attributes:
        amax_history: f32 `(H,)`; slot 0 newest, slot 1 oldest; 0 means nothing was
            recorded.
        scale: f32 `(1,)`, in Flax's sense: `amax / FP8_MAX`, the `scale_inv` of the
            step that ran last.
    """

    amax_history: jax.Array
    scale: jax.Array


class Scale(NamedTuple):
    """What a state of delayed scaling gives its quantizer for one step.

    Attributes:
        scale, scale_inv: f32 `(1,)`. Their cotangents are what the step recorded: the
            amax of the tensor, and the scale_inv that it was quantized with; 0 where
            it was not quantized.
        amax: f32 `(1,)`, 0: a buffer that the pass that quantizes raises; None where
            the scale is fixed, in inference: nothing is recorded.
        history: f32 `(H,)`, without gradient, where the tensor's own amax gives the
            scale if the history has none; None where it never does.
    """

    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array | None
    history: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DotGeneralState:
    """The state of one FP8 product, by quantizer; None for a quantizer without state.

    Attributes:
        input, kernel, output_grad: the states of the quantizers of x, the kernel and
            the gradient of the output: a QuantizerState for delayed scaling, the result
            of `init` for a user's quantizer.
        output, input_grad: the states for the output and for the gradient of x, which
            only a `CustomRecipe` quantizes.
        wgrad_input, dgrad_kernel, wgrad_output_grad: the states for x, kernel and
            gradient of the second product that reads each, where a `ByProduct` gives
            that product codes of its own.
    """

    input: Any
    kernel: Any
    output_grad: Any
    output: Any = None
    input_grad: Any = None
    wgrad_input: Any = None
    dgrad_kernel: Any = None
    wgrad_output_grad: Any = None

    def by_quantizer(self) -> ByQuantizer:
        """Return the states in the order of `Recipe.quantizers`."""
        return ByQuantizer(**vars(self))


for _cls in (QuantizerState, DotGeneralState):
    # Programs that take or return state can be saved: jax.export.Exported.serialize.
    jax.export.register_pytree_node_serialization(
        _cls,
        serialized_name=f"jaxfp8.{_cls.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )


def init_state(recipe: Recipe) -> DotGeneralState:
    """Return the state of a product that has not run: for delayed scaling empty
    histories and scale 1.

    The state of a recipe that keeps no state has no leaves.

    Raises:
        TypeError: `recipe` is not a Recipe.
    """
    quantizers = checked("init_state: recipe", recipe).quantizers()
    return DotGeneralState(*(quantizer.init() for quantizer in quantizers))


@functools.lru_cache(maxsize=256)
def variable_names(recipe: Recipe) -> DotGeneralState:
    """Return the state of a product with the name of its Flax variable in place of each
    leaf.

    The name begins with the role in `recipe.operands`: `input_amax_history`, in a
    custom recipe `linear_input_amax_history`. A state that is an array itself is called
    `input_state`.
    """

    def name_of(path, leaf):
        field, *rest = path
        name = jax.tree_util.keystr(tuple(rest), simple=True, separator="_")
        return f"{operands[field.name]}_{name or 'state'}"

    # A custom recipe has names of its own, for the first five.
    operands = dict(zip(ByQuantizer._fields, recipe.operands, strict=False))
    types = jax.eval_shape(lambda: init_state(recipe))
    return jax.tree_util.tree_map_with_path(name_of, types)


def keeps_state(recipe: Recipe) -> bool:
    """Tell whether products with this recipe have a state."""
    return bool(jax.tree.leaves(variable_names(recipe)))
