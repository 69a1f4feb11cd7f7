"""Reshape between an op's dimensions and the canonical form of custom calls, groups
`[g, ...]` (common/README.md).

Below are the dimensions and the scales of products.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import _scaling
from . import _checks
from ._primitive import ONE, Op, dims, merged


def merge(x, *counts):
    """Merge consecutive dimensions of `x`, as `merged` does those of a shape."""
    return x.reshape(merged(x.shape, *counts))


def parts(shape, rows, cols):
    """Return the leading dimensions of a shape, those of the rows, and those of the
    columns, which come last.
    """
    first = len(shape) - rows - cols
    return shape[:first], shape[first : first + rows], shape[first + rows :]


def pad(x, *widths):
    """Pad `x` with zeros after the end of each of its last dimensions."""
    leading = [(0, 0)] * (x.ndim - len(widths))
    return jnp.pad(x, leading + [(0, width) for width in widths]) if any(widths) else x


def transpose(x, rows, cols):
    """Move the last `cols` dimensions of `x` before the `rows` dimensions in front of
    them.
    """
    last, first = x.ndim - cols, x.ndim - cols - rows
    return jnp.moveaxis(x, range(last, x.ndim), range(first, first + cols))


def abs_max(x, vmap_dims):
    """Compute in jnp the amax of each vmapped index of `x`: f32 `[*vmapped, 1]`."""
    amax = _scaling.abs_max(x, axis=tuple(range(vmap_dims, x.ndim)))
    return amax.reshape(*x.shape[:vmap_dims], 1)


def raise_amax(amax, *amax_so_far):
    """Return the largest of non-negative f32 arrays, compared as integers: XLA's CPU
    threads flush subnormal floats.
    """
    bits = (x.view(jnp.uint32) for x in (amax, *amax_so_far))
    return functools.reduce(jnp.maximum, bits).view(jnp.float32)


def stretch(scale, x):
    """Reshape a scale of each vmapped index, f32 `[*vmapped, 1]`, to the rank of
    `x`.
    """
    return scale.reshape(*scale.shape[:-1], *[1] * (x.ndim - scale.ndim + 1))


def spread(scale, shape):
    """Repeat a scale of each vmapped index, f32 `[*vmapped, 1]`, for each element of
    `shape`.
    """
    if scale.ndim > len(shape):
        return scale.reshape(shape)
    return lax.broadcast_in_dim(scale, shape, tuple(range(scale.ndim)))


# Products -----------------------------------------------------------------------------


class Product(Op):
    """A product of a `[*batch, *m, *k]` and b `[*batch, *n, *k]`, kept as
    `[*batch, *m, *n]`.

    Attributes:
        out_dtype: dtype of the result.
        precise: whether fast accumulation is off.
        batch, rows, contracting: the numbers of dimensions of a that are batch, m and
            k.
        has_bias: whether a bias `[*batch, *n]` is added.
    """

    out_dtype: np.dtype
    precise: bool
    batch: int
    rows: int
    contracting: int
    has_bias: bool

    @property
    def leading(self):
        """The number of dimensions that a and b share, vmapped ones included."""
        return self.vmap_dims + self.batch

    def split(self, operands):
        """Return `(a, b, a_scale_inv, b_scale_inv, bias or None)`."""
        return operands[:5] if self.has_bias else (*operands[:4], None)

    def dtypes(self, *operands):
        return [self.out_dtype]

    def added(self):
        return [4] * self.has_bias

    def names(self, a, b, *_):
        batch, m = dims("batch", self.batch), dims("m", self.rows)
        n = dims("n", b - self.batch - self.contracting)
        k = dims("k", self.contracting)
        operands = [(batch, m, k), (batch, n, k), *self.scale_names(batch, m, n, k)]
        return operands + [(batch, n)] * self.has_bias, [(batch, m, n)]

    def scale_names(self, batch, m, n, k):
        """Return the names of the dimensions of a_scale_inv and b_scale_inv."""
        return ONE, ONE

    def dot(self, a, b, dtype, precision=None):
        """Multiply whole tensors to `dtype`, so that XLA can partition the product."""
        leading = tuple(range(self.leading))
        contracting = [tuple(range(x.ndim - self.contracting, x.ndim)) for x in (a, b)]
        numbers = contracting, (leading, leading)
        return lax.dot_general(
            a, b, numbers, precision=precision, preferred_element_type=dtype
        )

    def groups(self, a, b):
        """Return a and b as groups `[g, m, k]` and `[g, n, k]`, and the shape of their
        product before the merge.

        Without leading dimensions there is no g.
        """
        leading = self.leading
        columns = b.shape[leading : b.ndim - self.contracting]
        shape = *a.shape[: a.ndim - self.contracting], *columns
        groups = [leading] * (leading > 0)
        a = merge(a, *groups, self.rows)
        return a, merge(b, *groups, len(columns)), shape

    def finish(self, out, bias):
        """Add the bias, unless it is None, to a scaled product of whole tensors, and
        round it to `out_dtype`.
        """
        if bias is not None:
            leading = self.leading
            columns = (*range(leading), *range(leading + self.rows, out.ndim))
            bias = bias.astype(out.dtype)
            out = out + lax.broadcast_in_dim(bias, out.shape, columns)
        return (out.astype(self.out_dtype),)


def checked_product(kind, a, b, bias, batch, contracting, out_dtype, precise):
    """Check the arguments that products share: a `[*batch, *m, *k]`, b
    `[*batch, *n, *k]`, and a bias `[*batch, *n]` or None.

    Args:
        kind: the class of the op, a Product.
        batch: the number of leading dimensions that a and b share; None where m and n
            are one dimension each.
        contracting: the number of dimensions that k stands for.

    Returns:
        `(a, b, (batch, m, n, k), biases, product)`: the sizes, each a tuple, the bias
        in a list, which is empty for None, and the op with the fields of `Product`.
    """
    op = kind.name
    # Where m and n are one dimension each, the rank of a tells how many dimensions are
    # left for the batch.
    a, is_matrix = _checks.fp8(op, "a", a), batch is None
    batch = a.ndim - 1 - contracting if is_matrix else batch
    a = _checks.rank(op, "a", a, 1 + contracting if is_matrix else batch + contracting)
    b = _checks.fp8(op, "b", b)
    leading, m, k = parts(a.shape, a.ndim - batch - contracting, contracting)
    n = b.shape[batch : b.ndim - contracting]
    # The operands agree in front (batch) and at the end (k); m and n, in between, are
    # free.
    if b.shape != (*leading, *n, *k) or (is_matrix and b.ndim != a.ndim):
        needed = ", ".join(map(str, (*leading, "n", *k)))
        raise ValueError(
            f"{op}: b: expected [{needed}] to go with a{list(a.shape)}, got "
            f"{b.shape}; both operands have the contracting dimension last"
        )
    biases = []
    if bias is not None:
        bias = _checks.high_precision(op, "bias", bias)
        biases.append(_checks.shape(op, "bias", bias, (*leading, *n)))
    product = kind(
        out_dtype=_checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION),
        precise=_checks.flag(op, "precise", precise),
        batch=batch,
        rows=len(m),
        contracting=contracting,
        has_bias=bias is not None,
    )
    return a, b, (leading, m, n, k), biases, product


def rescaled(sums, a_scale_inv, b_scale_inv, spread=spread):
    """Multiply f32 sums by both inverse scales, to the bit as common/scale_product.h
    does.

    The product of the scales is one factor where that is a normal number. Where the
    factor flushes or overflows, the result need not: there the scales multiply one
    after the other.

    Args:
        sums: f32.
        a_scale_inv, b_scale_inv: f32, of shapes that broadcast.
        spread: `(factor, shape of sums) -> factor`, from the scales' shape.
    """
    first, second = _factors(a_scale_inv, b_scale_inv)
    return sums * spread(first, sums.shape) * spread(second, sums.shape)


@jax.jit
def _factors(a_scale_inv, b_scale_inv):
    """Return the two factors of `rescaled`; jitted, so that all products of a program
    share this function.
    """
    product, limits = a_scale_inv * b_scale_inv, np.finfo(np.float32)
    a_scale_inv = jnp.broadcast_to(a_scale_inv, product.shape)
    b_scale_inv = jnp.broadcast_to(b_scale_inv, product.shape)
    size = jnp.abs(product)
    is_normal = lax.clamp(limits.tiny, size, limits.max) == size
    # The 1 comes first: XLA may contract the last factor with a following addition,
    # such as a bias, as with one factor.
    first = lax.select(is_normal, is_normal.astype(product.dtype), a_scale_inv)
    return first, lax.select(is_normal, product, b_scale_inv)
