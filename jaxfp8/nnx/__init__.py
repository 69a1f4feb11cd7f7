"""Flax NNX: modules that hold quantizer state in `OverwriteWithGradient` variables, and
optimizers that store it.
"""

from ._dot_general import (
    Fp8DotGeneral,
    Fp8Einsum,
    Fp8RaggedDot,
    OverwriteWithGradient,
    trainable,
)
from ._layers import Experts, GatedMLP, Linear, NormDense
from ._quantize_by_rules import quantize
from ._training import Optimizer, grad, max_grad, step_if, update_state, value_and_grad

__all__ = [
    "Experts",
    "Fp8DotGeneral",
    "Fp8Einsum",
    "Fp8RaggedDot",
    "GatedMLP",
    "Linear",
    "NormDense",
    "Optimizer",
    "OverwriteWithGradient",
    "grad",
    "max_grad",
    "quantize",
    "step_if",
    "trainable",
    "update_state",
    "value_and_grad",
]
