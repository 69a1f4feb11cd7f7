"""Optimizer states in FP8: the moments of any optax transformation, at a quarter of
their bytes.
"""

from ..train import AppliedTransformation as AppliedTransformation
from ._adam import adamw as adamw
from ._moments import (
    Moment as Moment,
    SignedMoment as SignedMoment,
    SquaredMoment as SquaredMoment,
)
from ._quantized import (
    QuantizedState as QuantizedState,
    dequantize_state as dequantize_state,
    quantize_state as quantize_state,
    quantized as quantized,
)
from ._shardings import Memory as Memory, memory as memory, shardings as shardings
