"""Quantizers with one scale for the whole tensor."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..numerics import fp8_max
from ..ops._quantize import quantize_with
from ..ops._quantize_transpose import quantize_transpose_with
from ._quantizer import Quantizer, alone, column_sums, fp8_dtype
from ._tensor import QTensor


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
        options = {"amax": amax, "with_amax": amax is not None}
        if columnwise:
            options |= {"rows": rows, "cols": cols, "column_sums": sums}
            data, data_t, amax, *total = quantize_transpose_with(x, scale, self.fp8_dtype, **options)
        else:
            data, amax = quantize_with(x, scale, self.fp8_dtype, **options)
            data_t, total = None, [column_sums(x, rows, cols)] if sums else []
        counters = fractions(x, scale, self.fp8_dtype) if counts_in(run) else None
        run = self.seen(run, scale, scale_inv, amax, counters)
        return QTensor(data, scale_inv, data_t, cols=cols), run, *(total or [None])

    def scale(
        self, current: Callable[[], jax.Array], run: Any, reduce: Callable[..., Any] = alone
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """`(scale, scale_inv, amax so far)`, each f32[1]; None where the run keeps no amax.

        Args:
            current: gives the amax of the tensor; called, and inside a conditional, only where the scale may need it.
            run, reduce: as of `quantize_operand`.
        """
        del run
        return *self.scale_of(reduce(current(), None), jnp.ones((1,), jnp.float32)), None

    def scale_of(self, amax: jax.Array, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(scale, scale_inv)` for an amax; `stored` is the scale_inv that counts where there is none."""
        return ops.amax_to_scale(amax.reshape(1), stored, fp8_max=fp8_max(self.fp8_dtype), margin=self.margin)

    def seen(
        self,
        run: Any,
        scale: jax.Array,
        scale_inv: jax.Array,
        amax: jax.Array | None,
        fractions: jax.Array | None = None,
    ) -> Any:
        """The run of a tensor that was quantized with this scale.

        Args:
            run, scale, scale_inv: as of `scale`.
            amax: of the tensor; None where `scale` gave None.
            fractions: of saturated and flushed elements, where `counts_in` the run.
        """
        del scale, scale_inv, amax, fractions
        return run


def counts_in(run: Any) -> bool:
    """Whether a run has counters, so that elements are to be counted."""
    return getattr(run, "counting", None) is not None


def fractions(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """The fractions of the elements of x that saturate and that become zero, f32 `[2]`."""
    return ops.count_saturated_and_flushed(x, scale, dtype) / np.float32(max(x.size, 1))
