"""Recipes and quantizers with a scale for each block: a row, 32 or 128 elements of a
row, or 128 by 128 elements.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from .. import ops
from ..numerics import E4M3, HYBRID, Format
from ..ops import _checks
from ..ops._quantize_blocks import ROUNDINGS
from ._quantizer import DEFAULT, FP8Quantizer, OperandOptions, Quantized, Quantizer
from ._recipe import Recipe
from ._tensor import QTensor


class BlockwiseQuantizer(FP8Quantizer):
    """Quantize with a scale for each block, from its own amax; without state, and
    without a reduction over a mesh.

    A product along the first dimension reads other codes than a product along the last,
    because its blocks differ.

    Attributes:
        fp8_dtype: the dtype of the codes, float8_e4m3fn or float8_e5m2.
        block: `(r, c)`, the rows and columns that share a scale; `c = None` stands for
            all columns.
        scale_dtype, rounding: the dtype of the scales and the rounding of their
            exponents, see `ops.quantize_blocks`.
    """

    scale_dtype = "f32"
    rounding = "ceil"

    def quantize_operand(
        self, x: jax.Array, scale: Any, options: OperandOptions = DEFAULT
    ) -> Quantized:
        """Quantize an operand of a product; see `Quantizer.quantize_operand`."""
        # A GPU writes both layouts in one pass; elsewhere XLA drops the one nobody
        # reads.
        quantize = (
            ops.quantize_blocks_transpose if options.columnwise else ops.quantize_blocks
        )
        data, scale_inv, *transposed = quantize(
            x,
            self.fp8_dtype,
            block=self.block,
            scale=self.scale_dtype,
            rounding=self.rounding,
            # E8M0 holds nothing but powers of two
            power_2_scale=self.power_2_scale and self.scale_dtype == "f32",
            rows=options.rows,
            cols=options.cols,
        )
        # The product has to know whether scales are powers of two: newer GPUs multiply
        # no other float32 scales of blocks (`ops._blocks`).
        q = QTensor(
            data,
            scale_inv,
            *transposed,
            block=self.block,
            cols=options.cols,
            power_2_scale=self.power_2_scale,
        )
        return q, options.sum_rows(x)


@dataclasses.dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """A scale for each row of an operand, from the amax of the row; a row lies along
    the contraction. No state.

        y[i, j] = (sum over k of q(x)[i, k] * q(kernel)[k, j])
                  * x_scale_inv[i] * kernel_scale_inv[j]

    An outlier costs precision in its own row and column, not in the whole tensor. Each
    operand is quantized once for each product that reads it, because the rows of `x`
    are not the rows of `x.T`.

    Source: torchao's rowwise scaling.

    Attributes:
        fp8_format: `HYBRID` (e4m3 forward, e5m2 for `grad`), `E4M3` or `E5M2`.
        power_2_scale: round scales down to a power of two; Blackwell needs that, see
            `Float8BlockScaling`.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand; see `Recipe.quantizer_in`."""
        return Float8RowwiseQuantizer(dtype, self.power_2_scale)


@dataclasses.dataclass(frozen=True)
class Float8RowwiseQuantizer(BlockwiseQuantizer):
    """Quantize with one f32 scale for each row; the columns are the contraction.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        power_2_scale: round scales down to a power of two.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    power_2_scale: bool = False
    block = (1, None)


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """A scale for each tile of 1x128 of `x` and `grad`, and for each 128x128 of the
    kernel; no state.

    Tiles lie along the contraction, so `x` and `grad` are quantized once for each
    product that reads them. The kernel is quantized once: fprop and dgrad read the same
    codes. Sizes need not be multiples of 128: the last block is smaller.

    Source: TransformerEngine's Float8BlockScaling, DeepSeek-V3. There scales are powers
    of two unless told otherwise.

    Attributes:
        fp8_format: `E4M3`, the usual choice, for x, kernel and `grad`; `HYBRID` has
            e5m2 for `grad`; or `E5M2`.
        power_2_scale: round scales down to a power of two. NVIDIA's Blackwell
            multiplies no other scales of blocks in FP8; there the product repeats each
            scale for blocks of 32, which MXFP8 has.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = E4M3
    power_2_scale: bool = False

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand; see `Recipe.quantizer_in`."""
        block_scaling_dim = 2 if operand == "kernel" else 1
        return Float8BlockQuantizer(dtype, block_scaling_dim, self.power_2_scale)


@dataclasses.dataclass(frozen=True)
class Float8BlockQuantizer(BlockwiseQuantizer):
    """Quantize with one f32 scale for each tile of 1x128 along the contraction, or for
    each block of 128x128.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        block_scaling_dim: 1 for tiles of 1x128, 2 for blocks of 128x128, as
            TransformerEngine counts.
        power_2_scale: round scales down to a power of two.

    Raises:
        ValueError: `block_scaling_dim` is neither 1 nor 2.
        TypeError: `fp8_dtype` is not an FP8 dtype.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    block_scaling_dim: int = 1
    power_2_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__, "block_scaling_dim"
        _checks.one_of(*where, self.block_scaling_dim, (1, 2))

    @property
    def block(self) -> tuple[int, int]:
        """The rows and columns that share a scale, `(1, 128)` or `(128, 128)`."""
        return (1, 128) if self.block_scaling_dim == 1 else (128, 128)


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """A `scale_inv` `2**e`, stored as float8_e8m0fnu, for each 32 elements along the
    contraction; no state.

        e = ceil(log2(amax / FP8_MAX))                # "ceil": nothing saturates
            floor(log2(amax)) - floor(log2(FP8_MAX))  # "floor": the text of the OCP
                                                      # specification
        q = quantize(x, 2**-e)                        # e within [-127, 127]

    Every operand is quantized once for each product that reads it. Sizes need not be
    multiples of 32: the last block is smaller.

    Source: OCP Microscaling Formats (MX) v1.0; TransformerEngine's MXFP8BlockScaling.

    Attributes:
        fp8_format: `E4M3`, the usual choice, for x, kernel and `grad`; `HYBRID` has
            e5m2 for `grad`; or `E5M2`.
        rounding: how `e` is rounded, `"ceil"` or `"floor"`.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = E4M3
    rounding: str = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect(self.rounding in ROUNDINGS, "rounding", f"one of {ROUNDINGS}")

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand; see `Recipe.quantizer_in`."""
        return MXFP8Quantizer(dtype, self.rounding)


@dataclasses.dataclass(frozen=True)
class MXFP8Quantizer(BlockwiseQuantizer):
    """Quantize with one power of two, stored as float8_e8m0fnu, for each 32 elements
    along the contraction.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rounding: how the exponent is rounded, `"ceil"` or `"floor"`; see
            `MXFP8BlockScaling`.

    Raises:
        TypeError: `fp8_dtype` is not an FP8 dtype.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    rounding: str = "ceil"
    block = (1, 32)
    scale_dtype = "e8m0"
    power_2_scale = True
