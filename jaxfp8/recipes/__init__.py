"""Recipes, their quantizers and state; QTensor; `autocast` and rules, which choose the
recipe of a layer.

A recipe is data; its quantizers are pure functions.
"""

from ._amax_reduction import AmaxReduction
from ._autocast import autocast, is_off, resolve
from ._blockwise import (
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8RowwiseQuantizer,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    MXFP8Quantizer,
)
from ._by_product import ByProduct
from ._custom import ROLES, CustomRecipe
from ._delayed import DelayedScaling, DelayedScalingQuantizer
from ._quantizer import GEMMType, OperandOptions, Quantized, Quantizer, no_reduction
from ._read import (
    cotangent,
    read,
    reading_suffices,
    scales_of,
    scales_of_reading,
    shared,
)
from ._reading import reading_of, without_max
from ._recipe import (
    ByQuantizer,
    HighPrecision,
    HighPrecisionQuantizer,
    Recipe,
    SharedCodes,
    checked,
)
from ._rules import (
    NamedLayers,
    Rule,
    Rules,
    checked_rules,
    first_match,
    is_foreign,
    kind,
    layer_names,
    module_rule,
    some,
    warn_of_rules,
)
from ._state import (
    DotGeneralState,
    QuantizerState,
    Scale,
    init_state,
    keeps_state,
    variable_names,
)
from ._state_tree import OVERWRITE_WITH_GRADIENT
from ._tensor import (
    Block,
    QTensor,
    as_bytes,
    as_codes,
    dequantized,
    through_bytes,
    value_of,
)
from ._tensorwise import (
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    StaticScaling,
    StaticScalingQuantizer,
    TensorwiseQuantizer,
)
from ._warning import FP8StateWarning

__all__ = [
    "ByProduct",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingQuantizer",
    "DotGeneralState",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8RowwiseQuantizer",
    "Float8RowwiseScaling",
    "GEMMType",
    "HighPrecision",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "QTensor",
    "Quantizer",
    "QuantizerState",
    "Recipe",
    "Rule",
    "StaticScaling",
    "StaticScalingQuantizer",
]
