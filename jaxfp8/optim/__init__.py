"""Optimizer states in FP8: the moments of any optax transformation, at a quarter of
their bytes.
"""

from ..train import AppliedTransformation
from ._adam import adamw
from ._moments import Moment, SignedMoment, SquaredMoment
from ._quantized import QuantizedState, dequantize_state, quantize_state, quantized
from ._shardings import shardings

__all__ = [
    "AppliedTransformation",
    "Moment",
    "QuantizedState",
    "SignedMoment",
    "SquaredMoment",
    "adamw",
    "dequantize_state",
    "quantize_state",
    "quantized",
    "shardings",
]
