"""Flax Linen: layers whose quantizer state is in the collection
`_overwrite_with_gradient`.
"""

from ..recipes import OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT
from ._dot_general import (
    Fp8DotGeneral as Fp8DotGeneral,
    Fp8Einsum as Fp8Einsum,
    make_dot_general_cls as make_dot_general_cls,
)
from ._layers import Dense as Dense, GatedMLP as GatedMLP, NormDense as NormDense
from ._quantize_by_rules import quantize as quantize
from ._train_state import TrainState as TrainState, scan as scan
