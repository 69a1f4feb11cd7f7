"""QTensor: a quantized tensor and what undoes its scale."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from . import ops


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized tensor; a pytree.

    Attributes:
        data: codes `[..., rows, cols]`.
        scale_inv: f32[1]; `data * scale_inv` approximates the original.
        data_t: the same codes as `[..., cols, rows]`, or None. For GEMMs that contract over rows.
        source: the tensor these are the codes of, which gets the gradient; or None. `jaxfp8.quantize_params` sets it.
        run: of its quantizer, for the state that a product with these codes returns; or None.
    """

    data: jax.Array
    scale_inv: jax.Array
    data_t: jax.Array | None = None
    source: jax.Array | None = None
    run: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return self.data.ndim

    def map(self, function) -> "QTensor":
        """The codes and the source as `function` rearranges them: an `all_gather`, a slice, a transpose.

        Inside `shard_map`, codes then cross devices instead of kernels. The gradient goes back through `function`:

            kernel.map(lambda a: jax.lax.all_gather(a, "fsdp", axis=0, tiled=True))  # gradient: reduce-scattered

        Args:
            function: array -> array, of uint8 codes as well as of the source. It may move elements, not change them.

        Returns:
            A QTensor without `data_t`.
        """
        data = jax.lax.bitcast_convert_type(
            function(jax.lax.bitcast_convert_type(self.data, jnp.uint8)), self.data.dtype
        )
        source = None if self.source is None else function(self.source)
        return QTensor(data, self.scale_inv, source=source, run=self.run)

    def dequantize(self, dtype):
        """`data * scale_inv` in `dtype`: one multiplication in f32, one rounding."""
        return ops.dequantize(self.data, self.scale_inv, dtype)
