"""The dimensions of a dense product: what scaled_matmul and block_scaled_matmul share."""

import dataclasses

import numpy as np
from jax import lax

from . import _checks
from ._primitive import dims


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """The static part of a product of a `[*batch, *m, *k]` and b `[*batch, *n, *k]`, kept as `[*batch, *m, *n]`.

    Attributes:
        out_dtype: of the result.
        precise: whether fast accumulation is off.
        has_bias: whether a bias `[*batch, *n]` is added.
        batch, rows, contracting: how many dimensions of a are batch, m and k.
    """

    out_dtype: np.dtype
    precise: bool
    has_bias: bool
    batch: int
    rows: int
    contracting: int

    def names(self, b_rank: int):
        """Return the names of the dimensions: `(batch, m, n, k)`."""
        n = dims("n", b_rank - self.batch - self.contracting)
        return dims("batch", self.batch), dims("m", self.rows), n, dims("k", self.contracting)

    def dot(self, a, b, vmap_dims, **options):
        """Multiply whole tensors, so that XLA can partition the product."""
        leading = tuple(range(vmap_dims + self.batch))
        contracting = [tuple(range(x.ndim - self.contracting, x.ndim)) for x in (a, b)]
        return lax.dot_general(a, b, (contracting, (leading, leading)), **options)

    def add_bias(self, out, bias, vmap_dims):
        """Add a bias in the dtype of the product; None adds nothing."""
        if bias is None:
            return out
        leading = vmap_dims + self.batch
        columns = (*range(leading), *range(leading + self.rows, out.ndim))
        return out + lax.broadcast_in_dim(bias.astype(out.dtype), out.shape, columns)


def spec_fields(op: str, leading, m, n, contracting, bias, out_dtype, precise):
    """Check what both ops take beside a, b and scales: `(operands of the bias, the fields of a ProductSpec)`."""
    operands = []
    if bias is not None:
        operands.append(_checks.shape(op, "bias", _checks.high_precision(op, "bias", bias), (*leading, *n)))
    return operands, {
        "precise": _checks.flag(op, "precise", precise),
        "out_dtype": _checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION),
        "has_bias": bias is not None,
        "batch": len(leading),
        "rows": len(m),
        "contracting": contracting,
    }
