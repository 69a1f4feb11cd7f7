"""Any dot_general as matrix products: which dimensions of an operand are batch, rows
and columns.

Dimensions are put in order and never merged: on a mesh each keeps its own sharding.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..recipes import OperandOptions, QTensor


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an operand becomes `[*batch, *rows, *cols]`: as it is where its dimensions
    allow, else by a transpose.

    Attributes:
        shape: the shape of the operand.
        batch, contract: the operand's dimensions by their part in the product, in the
            same order as in the other operand's layout.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    contract: tuple[int, ...]

    @functools.cached_property
    def free(self) -> tuple[int, ...]:
        """Return the other dimensions, in their order."""
        used = self.batch + self.contract
        return tuple([d for d in range(len(self.shape)) if d not in used])

    @functools.cached_property
    def contract_first(self) -> bool:
        """Tell whether the contracting dimensions are the rows (else the columns)."""
        order = self.batch + self.contract + self.free
        return bool(self.contract) and order == tuple(range(len(self.shape)))

    @property
    def is_rows_by_last(self) -> bool:
        """Tell whether the last dimension alone is contracted, and all others are
        rows.
        """
        last = len(self.shape) - 1
        return not self.batch and self.contract == (last,) and last > 0

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the dimensions that are rows, and those that are columns."""
        if self.contract_first:
            return self.contract, self.free
        return self.free, self.contract

    def options(
        self, columnwise: bool, reduce: Callable[..., jax.Array]
    ) -> OperandOptions:
        """Return the options of an operand `ordered`; see `OperandOptions`."""
        rows, cols = map(len, self.matrix)
        first = self.contract_first
        return OperandOptions(
            rows, cols, columnwise, reduce=reduce, contract_first=first
        )

    @property
    def _order(self) -> tuple[int, ...]:
        rows, cols = self.matrix
        return self.batch + rows + cols

    def ordered(self, x):
        """Transpose `x` to `[*batch, *rows, *cols]`."""
        return jnp.transpose(x, self._order)

    def restored(self, x):
        """Undo `ordered`."""
        return jnp.transpose(x, np.argsort(self._order))


def checked_numbers(dimension_numbers, x_shape, kernel_shape) -> tuple:
    """Return dimension numbers of `jax.lax.dot_general` as tuples of Python integers.

    Raises:
        ValueError: they are not two pairs of sequences of integers, or do not fit the
            shapes.
    """
    try:
        numbers = tuple(
            [
                tuple([tuple(map(operator.index, dims)) for dims in pair])
                for pair in dimension_numbers
            ]
        )
        lax.dot_general_p.abstract_eval(
            jax.core.ShapedArray(x_shape, jnp.float32),
            jax.core.ShapedArray(kernel_shape, jnp.float32),
            dimension_numbers=numbers,
            precision=None,
            preferred_element_type=None,
            out_sharding=None,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            "dot_general: dimension_numbers: expected ((x_contract, kernel_contract), "
            f"(x_batch, kernel_batch)) of x{tuple(x_shape)} and "
            f"kernel{tuple(kernel_shape)}, for example (((1,), (0,)), ((), ())) of two "
            f"matrices, got {dimension_numbers!r}: {error}"
        ) from error
    return numbers


def layouts(x_shape, kernel_shape, dimension_numbers) -> tuple[Layout, Layout]:
    """Return the layouts of both operands of `jax.lax.dot_general`, whose dimension
    numbers are those of `checked_numbers`.
    """
    # Sort contracting dimensions as x holds them: with the usual kernels no operand
    # then needs a transpose.
    contract, (x_batch, kernel_batch) = dimension_numbers
    pairs = sorted(zip(*contract, strict=True))
    return (
        Layout(tuple(x_shape), x_batch, tuple([p[0] for p in pairs])),
        Layout(tuple(kernel_shape), kernel_batch, tuple([p[1] for p in pairs])),
    )


def size(x: Layout, kernel: Layout) -> int:
    """Return the number of multiplications of a product."""
    return math.prod(x.shape) * math.prod([kernel.shape[d] for d in kernel.free])


def both_layouts(
    q: QTensor, batch: int, contract_first: bool, is_kept: bool
) -> tuple[QTensor, QTensor]:
    """Return the operand of the first product, contracting dimensions last, and the
    QTensor that is kept.

    With `is_kept` the second QTensor is the operand of the second product; else it
    serves the next state alone.
    """
    last = q.transposed(batch) if contract_first else q
    if not is_kept:
        return dataclasses.replace(last, data_t=None), q.for_next_state()
    first = q if contract_first else q.transposed(batch)
    # On a mesh the first product may gather the layout that the second one reads, once
    # for both.
    last = dataclasses.replace(last, data_t=first.data)
    return last, dataclasses.replace(first, data_t=None, scale_inv_t=None)
