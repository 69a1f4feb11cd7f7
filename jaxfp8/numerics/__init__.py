"""FP8 numbers: formats, the arithmetic of scales, the codec, moments of optimizers. No
state and no custom calls.
"""

from ._codec import (
    E4M3,
    E5M2,
    FP8_DTYPES,
    HYBRID,
    Format,
    decode,
    encode,
    fp8_max,
    is_saturated_or_flushed,
    rounded,
)
