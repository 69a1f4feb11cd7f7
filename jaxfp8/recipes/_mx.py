"""MXFP8: blocks of 32 with a power of two for a scale."""

import dataclasses

from ..numerics import E4M3, Format
from ._blockwise import ROUNDINGS, MXFP8Quantizer
from ._quantizer import Quantizer
from ._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A scale `2**e`, stored as float8_e8m0fnu, for each 32 elements along what a product contracts; no state.

        e = ceil(log2(amax / FP8_MAX))              # "ceil": nothing saturates
            floor(log2(amax)) - floor(log2(FP8_MAX))    # "floor": the text of the OCP specification
        q = quantize(x, 2**-e)                      # e within [-127, 127]

    Every operand is quantized once for each product that reads it. Sizes need not be multiples of 32.

    Source: OCP Microscaling Formats (MX) v1.0; TransformerEngine's MXFP8BlockScaling.

    Attributes:
        fp8_format: `E4M3`, as is the custom, for all three; `HYBRID` has e5m2 for `grad`; or `E5M2`.
        rounding: of the exponent, `"ceil"` or `"floor"`.
        precise, min_size, pipeline_axes: keyword-only, see `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = E4M3
    rounding: str = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(self.rounding in ROUNDINGS, "rounding", f"one of {ROUNDINGS}")

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of `x`, `kernel` and `grad`."""
        return self.for_formats(lambda dtype: MXFP8Quantizer(dtype, self.rounding))
