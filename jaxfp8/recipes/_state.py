"""Quantizer state: explicit pytrees, one leaf an array."""

import dataclasses

import jax
from jax import export


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerState:
    """What one quantizer remembers.

    Attributes:
        amax_history: f32 `(H,)`; slot 0 newest, slot 1 oldest; 0 means nothing was recorded.
        scale: f32 `(1,)`, in Flax's sense: `amax / FP8_MAX`, the `scale_inv` of the step that ran last.
    """

    amax_history: jax.Array
    scale: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizerRun:
    """One quantizer in one step: what its state said, and the amax it has seen so far.

    Attributes:
        history: f32 `(H,)`, moved one step: the oldest entry is gone, slot 0 waits for the amax.
        scale, scale_inv: f32 `(1,)`; scale is None where it is not needed any more.
        amax: f32 `(1,)`, 0 at first.
        is_empty: bool[], whether the history held nothing; None where that does not matter.
    """

    history: jax.Array
    scale: jax.Array | None
    scale_inv: jax.Array
    amax: jax.Array
    is_empty: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DotGeneralState:
    """The state of one FP8 product: a quantizer each for the input, the kernel and the gradient of the output."""

    input: QuantizerState
    kernel: QuantizerState
    output_grad: QuantizerState


for _cls in (QuantizerState, DotGeneralState):
    # Programs that take or return state can be saved: jax.export.Exported.serialize.
    export.register_pytree_node_serialization(
        _cls,
        serialized_name=f"jaxfp8.{_cls.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )


def init_state(recipe) -> DotGeneralState:
    """State of a product that has not run: empty histories, scale 1."""
    return DotGeneralState(*(quantizer.init() for quantizer in recipe.quantizers()))
