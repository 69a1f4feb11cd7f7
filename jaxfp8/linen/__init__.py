"""Flax Linen: layers whose quantizer state is in the collection
`_overwrite_with_gradient`.
"""

from ..recipes import OVERWRITE_WITH_GRADIENT
from ._dot_general import Fp8DotGeneral, Fp8Einsum, Fp8RaggedDot, make_dot_general_cls
from ._layers import Dense, Experts, GatedMLP, NormDense
from ._quantize_by_rules import quantize
from ._train_state import TrainState, scan

__all__ = [
    "Dense",
    "Experts",
    "Fp8DotGeneral",
    "Fp8Einsum",
    "Fp8RaggedDot",
    "GatedMLP",
    "NormDense",
    "OVERWRITE_WITH_GRADIENT",
    "TrainState",
    "make_dot_general_cls",
    "quantize",
    "scan",
]
