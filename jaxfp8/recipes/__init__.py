"""Which scale a tensor gets and the state that takes; QTensor; which layer runs which recipe: autocast, rules.

A recipe is data; its quantizers are pure functions.
"""

from ._amax_reduction import AmaxReduction
from ._autocast import autocast, resolve
from ._block import Float8BlockScaling as Float8BlockScaling
from ._blockwise import (
    Float8BlockQuantizer as Float8BlockQuantizer,
    Float8RowwiseQuantizer as Float8RowwiseQuantizer,
    MXFP8Quantizer as MXFP8Quantizer,
)
from ._current import (
    Float8CurrentScaling as Float8CurrentScaling,
    Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer,
)
from ._custom import ROLES as ROLES, CustomRecipe as CustomRecipe
from ._delayed import (
    DelayedScaling as DelayedScaling,
    DelayedScalingQuantizer as DelayedScalingQuantizer,
    next_states as next_states,
    read_states as read_states,
)
from ._fixed import FixedScale as FixedScale, FixedScaleQuantizer as FixedScaleQuantizer
from ._high_precision import HighPrecision as HighPrecision, HighPrecisionQuantizer as HighPrecisionQuantizer
from ._mx import MXFP8BlockScaling as MXFP8BlockScaling
from ._quantizer import (
    GEMMType as GEMMType,
    OperandOptions as OperandOptions,
    Quantizer as Quantizer,
    no_reduction as no_reduction,
)
from ._recipe import Recipe as Recipe, checked as checked
from ._rowwise import Float8RowwiseScaling as Float8RowwiseScaling
from ._rules import Rule, Rules, checked_rules, first_match, kind, relative
from ._state import (
    DotGeneralState as DotGeneralState,
    QuantizerState as QuantizerState,
    QuantizerStep as QuantizerStep,
    init_state as init_state,
    map_variables as map_variables,
)
from ._state_tree import OVERWRITE_WITH_GRADIENT, partition, prefix_of, slot_axis
from ._tensor import Block, QTensor, dequantized, value_of
from ._tensorwise import (
    TensorwiseQuantizer as TensorwiseQuantizer,
    fractions as fractions,
    has_counters as has_counters,
)
from ._warning import FP8StateWarning
