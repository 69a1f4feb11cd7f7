"""Flax Linen: layers whose quantizer state is in the collection `_overwrite_with_gradient`."""

from ..recipes import OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT
from ._dense import Dense as Dense
from ._dot_general import (
    Fp8DotGeneral as Fp8DotGeneral,
    Fp8Einsum as Fp8Einsum,
    make_dot_general_cls as make_dot_general_cls,
)
from ._gated_mlp import GatedMLP as GatedMLP
from ._norm_dense import NormDense as NormDense
from ._quantize import quantize as quantize
from ._scan import scan as scan
from ._train_state import TrainState as TrainState
