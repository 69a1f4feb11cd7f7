"""The dimensions and the scales of a product, for scaled_matmul, block_scaled_matmul and ragged_matmul."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _checks, _shapes
from ._primitive import dims


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """The static part of a product of a `[*batch, *m, *k]` and b `[*batch, *n, *k]`, kept as `[*batch, *m, *n]`.

    Attributes:
        out_dtype: dtype of the result.
        precise: whether fast accumulation is off.
        has_bias: whether a bias `[*batch, *n]` is added.
        batch, rows, contracting: the numbers of dimensions of a that are batch, m and k.
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

    def dot(self, a, b, vmap_dims, dtype, precision=None):
        """Multiply whole tensors to `dtype`, so that XLA can partition the product."""
        leading = tuple(range(vmap_dims + self.batch))
        contracting = [tuple(range(x.ndim - self.contracting, x.ndim)) for x in (a, b)]
        numbers = contracting, (leading, leading)
        return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=dtype)

    def groups(self, a, b, vmap_dims):
        """Return a and b as groups `[g, m, k]` and `[g, n, k]`, and the shape of their product before the merge.

        Without leading dimensions there is no g.
        """
        leading = vmap_dims + self.batch
        shape = (*a.shape[: a.ndim - self.contracting], *b.shape[leading : b.ndim - self.contracting])
        columns = b.ndim - leading - self.contracting
        return _shapes.merge_groups(a, leading, self.rows), _shapes.merge_groups(b, leading, columns), shape

    def add_bias(self, out, bias, vmap_dims):
        """Add a bias in the dtype of the product; None adds nothing."""
        if bias is None:
            return out
        leading = vmap_dims + self.batch
        columns = (*range(leading), *range(leading + self.rows, out.ndim))
        return out + lax.broadcast_in_dim(bias.astype(out.dtype), out.shape, columns)


def rescaled(
    sums: jax.Array, a_scale_inv: jax.Array, b_scale_inv: jax.Array, spread: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Multiply f32 sums by both inverse scales, to the bit as common/scale_product.h does.

    The product of the scales is one factor where that is a normal number. Where the factor flushes or overflows, the
    result need not: there the scales multiply one after the other.

    Args:
        sums: f32.
        a_scale_inv, b_scale_inv: f32, of shapes that broadcast.
        spread: broadcasts a factor from the scales' shape to the shape of sums.
    """
    first, second = _factors(a_scale_inv, b_scale_inv)
    return sums * spread(first) * spread(second)


@jax.jit
def _factors(a_scale_inv, b_scale_inv):
    """Return the two factors of `rescaled`; jitted, so that all products of a program share this function."""
    product, limits = a_scale_inv * b_scale_inv, np.finfo(np.float32)
    a_scale_inv, b_scale_inv = (jnp.broadcast_to(scale, product.shape) for scale in (a_scale_inv, b_scale_inv))
    size = jnp.abs(product)
    is_normal = lax.clamp(limits.tiny, size, limits.max) == size
    # The 1 comes first: XLA may contract the last factor with a following addition, such as a bias, as with one factor.
    unit = is_normal.astype(product.dtype)
    return lax.select(is_normal, unit, a_scale_inv), lax.select(is_normal, product, b_scale_inv)


def bias_operands(op: str, bias, shape) -> list:
    """Check a bias of this shape, and return it in a list; an empty list for None."""
    return [] if bias is None else [_checks.shape(op, "bias", _checks.high_precision(op, "bias", bias), shape)]
