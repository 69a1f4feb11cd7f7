"""Row-wise scaling: a scale for each row of x and grad and each column of the kernel."""

import dataclasses

from ..numerics import HYBRID, Format
from ._blockwise import Float8RowwiseQuantizer
from ._quantizer import Quantizer
from ._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """A scale for each row of what a product contracts, from its own amax; no state.

        y[i, j] = (sum over k of q(x)[i, k] * q(kernel)[k, j]) * x_scale_inv[i] * kernel_scale_inv[j]

    An outlier costs its own row and column precision, not the tensor. Each operand is quantized once for each product
    that reads it, because rows of `x` are not those of `x.T`.

    Source: torchao's rowwise scaling.

    Attributes:
        fp8_format: `HYBRID` (e4m3 forward, e5m2 for `grad`), `E4M3` or `E5M2`.
        power_2_scale: round scales down to a power of two; as of `Float8BlockScaling`, for Blackwell.
        precise, min_size, pipeline_axes: keyword-only, see `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of `x`, `kernel` and `grad`."""
        return self.for_formats(lambda dtype: Float8RowwiseQuantizer(dtype, self.power_2_scale))
