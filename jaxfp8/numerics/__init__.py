"""FP8 numbers: formats, the arithmetic of scales, the codec. No state and no custom calls."""

from ._codec import decode, encode, is_saturated_or_flushed, rounded
from ._formats import E4M3, E5M2, FP8_DTYPES, HYBRID, Format, fp8_max
