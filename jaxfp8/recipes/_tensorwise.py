"""Quantizers with one scale for the whole tensor."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..formats import fp8_max
from ..tensor import QTensor
from ._quantizer import Quantizer, alone, column_sums, fp8_dtype


class TensorwiseQuantizer(Quantizer):
    """One scale for the whole tensor: codes and transposed codes are the same numbers, made in one pass.

    Attributes:
        fp8_dtype: of the codes.
        margin: headroom in powers of two.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "fp8_dtype", fp8_dtype(type(self).__name__, self.fp8_dtype))

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """`(QTensor, next state)` of a matrix; see `Quantizer`."""
        return self.quantize_operand(x, None)[0], state

    def quantize_operand(
        self,
        x: jax.Array,
        run: Any,
        *,
        rows: int = 1,
        cols: int = 1,
        rowwise: bool = True,
        columnwise: bool = True,
        sums: bool = False,
        reduce: Callable[..., Any] = alone,
        contract_first: bool = False,
    ) -> tuple[Any, Any, Any]:
        """As `Quantizer.quantize_operand`."""
        del rowwise, contract_first  # the codes are there anyway
        scale, scale_inv, amax = self.scale(lambda: ops.amax(x), run, reduce)
        data_t = total = None
        counts = counts_in(run)
        if columnwise:
            options = {"rows": rows, "cols": cols, "amax": amax, "column_sums": sums, "counts": counts}
            data, data_t, amax, *more = ops.quantize_transpose(x, scale, self.fp8_dtype, **options)
            total = more.pop(0) if sums else None
        else:
            data, amax, *more = ops.quantize(x, scale, self.fp8_dtype, amax=amax, counts=counts)
            total = column_sums(x, rows, cols) if sums else None
        fractions = (fractions_of(of, x.size) for of in more)
        return QTensor(data, scale_inv, data_t, cols=cols), self.seen(run, scale, scale_inv, amax, *fractions), total

    def scale(
        self, current: Callable[[], jax.Array], run: Any, reduce: Callable[..., Any] = alone
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`(scale, scale_inv, amax so far)`, each f32[1]; where there is no state, the amax of the tensor.

        Args:
            current: gives the amax of the tensor; called, and inside a conditional, only where the scale may need it.
            run, reduce: as of `quantize_operand`.
        """
        del run
        amax = reduce(current(), None)
        # Nothing raises it any more. A zero in its place would be a constant, which a custom call that works in place
        # has copied first: one launch more.
        return *self.scale_of(amax, jnp.ones((1,), jnp.float32)), amax

    def scale_of(self, amax: jax.Array, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(scale, scale_inv)` for an amax; `stored` is the scale_inv that counts where there is none."""
        return ops.amax_to_scale(amax.reshape(1), stored, fp8_max=fp8_max(self.fp8_dtype), margin=self.margin)

    def seen(
        self, run: Any, scale: jax.Array, scale_inv: jax.Array, amax: jax.Array, fractions: jax.Array | None = None
    ) -> Any:
        """The run of a tensor that was quantized with this scale and had this amax; `fractions` where `counts_in`."""
        del scale, scale_inv, amax, fractions
        return run


def counts_in(run: Any) -> bool:
    """Whether a run has counters, so that elements are to be counted."""
    return getattr(run, "counting", None) is not None


def fractions_of(counts: jax.Array, size: int) -> jax.Array:
    """Counts of elements as fractions of a tensor of that size."""
    return counts / np.float32(max(size, 1))
