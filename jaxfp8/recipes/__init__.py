"""Recipes: how operands become FP8, and the state that takes. A recipe is data; its quantizers are pure functions."""

from ._delayed import (
    DelayedScaling as DelayedScaling,
    DelayedScalingQuantizer as DelayedScalingQuantizer,
    finish as finish,
    start as start,
)
from ._state import (
    DotGeneralState as DotGeneralState,
    QuantizerRun as QuantizerRun,
    QuantizerState as QuantizerState,
    init_state as init_state,
)
