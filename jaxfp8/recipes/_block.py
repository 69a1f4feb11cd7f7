"""Block scaling: f32 scales for tiles of 1x128 and blocks of 128x128."""

import dataclasses

from ..numerics import E4M3, Format
from ._blockwise import Float8BlockQuantizer
from ._quantizer import Quantizer
from ._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A scale for each tile of 1x128 of `x` and `grad`, and for each 128x128 of the kernel; no state.

    Tiles lie along what a product contracts, so that `x` and `grad` are quantized once for each product that reads
    them; the codes of the kernel serve both. Sizes need not be multiples of 128: the last block is smaller.

    Source: TransformerEngine's Float8BlockScaling, DeepSeek-V3. There scales are powers of two unless told otherwise.

    Attributes:
        fp8_format: `E4M3`, as is the custom, for all three; `HYBRID` has e5m2 for `grad`; or `E5M2`.
        power_2_scale: round scales down to a power of two. NVIDIA's Blackwell multiplies no others in FP8: there such a
            scale is that of blocks of 32, as MXFP8 has them.
        precise, min_size, pipeline_axes: keyword-only, see `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = E4M3
    power_2_scale: bool = False

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of `x`, `kernel` and `grad`."""
        x, _, grad = self.for_formats(lambda dtype: Float8BlockQuantizer(dtype, 1, self.power_2_scale))
        return x, dataclasses.replace(x, block_scaling_dim=2), grad
