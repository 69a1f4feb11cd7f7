"""Flax NNX: modules that hold quantizer state in `OverwriteWithGradient` variables, and
optimizers that store it.
"""

from ._dot_general import (
    Fp8DotGeneral as Fp8DotGeneral,
    Fp8Einsum as Fp8Einsum,
    OverwriteWithGradient as OverwriteWithGradient,
    trainable as trainable,
)
from ._layers import GatedMLP as GatedMLP, Linear as Linear, NormDense as NormDense
from ._quantize_by_rules import quantize as quantize
from ._training import (
    Optimizer as Optimizer,
    grad as grad,
    max_grad as max_grad,
    step_if as step_if,
    update_state as update_state,
    value_and_grad as value_and_grad,
)
