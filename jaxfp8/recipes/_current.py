"""Current scaling: the scale comes from the tensor in hand, which is read twice."""

import dataclasses

import numpy as np

from ..numerics import HYBRID, Format
from ._quantizer import Quantizer
from ._recipe import Recipe
from ._tensorwise import TensorwiseQuantizer


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale for each tensor, from its own amax; no state.

        sf = FP8_MAX / amax(x)           # at most 2**126; 1 for a tensor of zeros, or one that is not finite
        q  = quantize(x, sf)

    On a mesh the amax is that of the whole tensor: where delayed scaling reduces amaxes once a step, each product here
    waits for its own. `ops.amax` reads the tensor once more.

    Source: TransformerEngine's FP8 current scaling.

    Attributes:
        fp8_format: `HYBRID` (e4m3 forward, e5m2 for `grad`), `E4M3` or `E5M2`.
        power_2_scale: round scales down to a power of two; then quantizing is exact but for the mantissa's rounding.
        precise, min_size, pipeline_axes: keyword-only, see `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of `x`, `kernel` and `grad`."""
        return self.for_formats(lambda dtype: Float8CurrentScalingQuantizer(dtype, self.power_2_scale))


@dataclasses.dataclass(frozen=True)
class Float8CurrentScalingQuantizer(TensorwiseQuantizer):
    """Quantize one tensor by current scaling.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        power_2_scale: see `Float8CurrentScaling`.
    """

    fp8_dtype: np.dtype
    power_2_scale: bool = False
