"""HighPrecision: the recipe, and the quantizer, of tensors that stay as they are."""

import dataclasses
from typing import Any

import jax

from ._quantizer import DEFAULT, OperandOptions, Quantized, Quantizer
from ._recipe import Recipe
from ._tensor import QTensor


@dataclasses.dataclass(frozen=True)
class HighPrecisionQuantizer(Quantizer):
    """Keep a tensor as it is: `data` is the tensor, and there is no scale."""

    def check_state(self, name: str, state: Any) -> None:
        """Raise a ValueError unless `state` is None; `name` names the argument in the message."""
        if jax.tree.leaves(state):
            raise ValueError(f"{name}: expected no state, as the recipe keeps this tensor unquantized, got {state!r}")

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """Return `(QTensor, state)` of a matrix."""
        return QTensor(x, None), state

    def quantize_operand(self, x: jax.Array, use: Any, options: OperandOptions = DEFAULT) -> Quantized:
        """Return x as an operand of a product; see `Quantizer.quantize_operand`."""
        return QTensor(x, None, cols=options.cols), options.sum_rows(x)


@dataclasses.dataclass(frozen=True)
class HighPrecision(Recipe):
    """Compute without FP8: a layer with this recipe computes as without jaxfp8, also in `autocast`; it has no state.

    None in a rule (`jaxfp8.linen.quantize`) means this recipe; a layer whose own recipe is None has the default one.
    """

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return a `HighPrecisionQuantizer` for each tensor."""
        return (HighPrecisionQuantizer(),) * 3
