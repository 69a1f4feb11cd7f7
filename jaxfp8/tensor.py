"""QTensor: a quantized tensor and what undoes its scale."""

import dataclasses

import jax

from . import ops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized tensor; a pytree.

    Attributes:
        data: codes `[..., rows, cols]`.
        scale_inv: f32[1]; `data * scale_inv` approximates the original.
        data_t: the same codes as `[..., cols, rows]`, or None. For GEMMs that contract over rows.
    """

    data: jax.Array
    scale_inv: jax.Array
    data_t: jax.Array | None = None

    def dequantize(self, dtype):
        """`data * scale_inv` in `dtype`: one multiplication in f32, one rounding."""
        return ops.dequantize(self.data, self.scale_inv, dtype)
