"""Quantizers with a scale for each block: of a row, of 32 or 128 elements of it, or of 128 by 128."""

import dataclasses
from typing import Any

import jax
import numpy as np

from .. import ops
from ..numerics import E4M3
from ..ops._quantize_blocks import ROUNDINGS as ROUNDINGS
from ._quantizer import DEFAULT, OperandOptions, Quantizer, fp8_dtype
from ._tensor import QTensor


class BlockwiseQuantizer(Quantizer):
    """Quantize with a scale for each block, from its own amax; without state, and without a reduction over a mesh.

    A product along the first dimension reads other codes than a product along the last, because its blocks differ.

    Attributes:
        fp8_dtype: of the codes.
        block: `(r, c)`: the rows and columns that share a scale; None is all of them.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_dtype", fp8_dtype(type(self).__name__, self.fp8_dtype))

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """Quantize a matrix; return `(QTensor, state)`."""
        return self.quantize_operand(x, None)[0], state

    def quantize_operand(
        self, x: jax.Array, step: Any, options: OperandOptions = DEFAULT
    ) -> tuple[QTensor, jax.Array | None]:
        """Quantize an operand of a product; see `Quantizer.quantize_operand`."""
        scaling = self.scaling()
        blocks = {"rows": options.rows, "cols": options.cols} | scaling
        if options.columnwise:  # a GPU writes both layouts in one pass; elsewhere XLA drops the one nobody reads
            data, scale_inv, data_t, scale_inv_t = ops.quantize_blocks_transpose(x, self.fp8_dtype, **blocks)
        else:
            data, scale_inv = ops.quantize_blocks(x, self.fp8_dtype, **blocks)
            data_t = scale_inv_t = None
        # The product has to know: newer GPUs multiply float32 scales only where these are powers of two
        # (`ops._scale_layouts`).
        is_power = scaling.get("scale") == "e8m0" or scaling.get("power_2_scale", False)
        layout = {"block": self.block, "cols": options.cols, "power_2_scale": is_power}
        return QTensor(data, scale_inv, data_t, scale_inv_t, step=step, **layout), options.sum_rows(x)

    def scaling(self) -> dict[str, Any]:
        """Return the keywords of `ops.quantize_blocks` that say how blocks are scaled."""
        return {"block": self.block, "power_2_scale": self.power_2_scale}


@dataclasses.dataclass(frozen=True)
class Float8RowwiseQuantizer(BlockwiseQuantizer):
    """One f32 scale for each row of what a product contracts.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        power_2_scale: round scales down to a power of two.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    power_2_scale: bool = False
    block = (1, None)


@dataclasses.dataclass(frozen=True)
class Float8BlockQuantizer(BlockwiseQuantizer):
    """One f32 scale for 128 elements along what a product contracts, or for 128 by 128.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        block_scaling_dim: 1 for tiles of 1x128, 2 for blocks of 128x128, as TransformerEngine counts.
        power_2_scale: round scales down to a power of two.

    Raises:
        ValueError: another block_scaling_dim.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    block_scaling_dim: int = 1
    power_2_scale: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer: block_scaling_dim: expected 1 or 2, got {self.block_scaling_dim}")

    @property
    def block(self) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        return (1, 128) if self.block_scaling_dim == 1 else (128, 128)


@dataclasses.dataclass(frozen=True)
class MXFP8Quantizer(BlockwiseQuantizer):
    """One power of two, as float8_e8m0fnu, for 32 elements along what a product contracts.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        rounding: of the exponent, `"ceil"` or `"floor"`; see `MXFP8BlockScaling`.

    Raises:
        ValueError: another rounding.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    rounding: str = "ceil"
    block = (1, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"MXFP8Quantizer: rounding: expected one of {ROUNDINGS}, got {self.rounding!r}")

    def scaling(self) -> dict[str, Any]:
        """Return the keywords of `ops.quantize_blocks`; see `BlockwiseQuantizer.scaling`."""
        return {"block": self.block, "scale": "e8m0", "rounding": self.rounding}
