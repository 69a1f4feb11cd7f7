"""Row-wise scaling: a scale for each row of x and grad and each column of the kernel."""

import dataclasses

from ..numerics import HYBRID, Format
from ._amax_reduction import NOT_SAID
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
        precise, min_size, pipeline_axes: see `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False
    precise: tuple[str, ...] = ("dgrad", "wgrad")
    min_size: int = 0
    pipeline_axes: tuple[str, ...] = NOT_SAID

    def __post_init__(self) -> None:
        self.check_options()

    def quantizers(self) -> tuple[Quantizer | None, ...]:
        """The quantizers of `x`, `kernel` and `grad`."""
        forward, backward = (
            Float8RowwiseQuantizer(dtype, self.power_2_scale)
            for dtype in (self.fp8_format.dtype, self.fp8_format.backward_dtype)
        )
        return forward, forward, backward
