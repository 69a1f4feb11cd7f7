"""quantize_transpose: FP8 codes in both layouts, and the amax, in one read; and
`Producer`, which computes x too.
"""

import jax
from jax.typing import ArrayLike, DTypeLike

from . import _checks
from ._quantize import Quantization, Quantize


def quantize_transpose(
    x: ArrayLike,
    scale: ArrayLike,
    dtype: DTypeLike,
    *,
    rows: int = 1,
    cols: int = 1,
    amax: ArrayLike | None = None,
    with_amax: bool = True,
    column_sums: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Quantize `x` in both layouts: FP8 GEMMs on Hopper and Ada read both operands
    along the contraction.

    Equivalent to `data, amax = quantize(x, scale, dtype, amax=amax); data_t = data.mT`
    with one read of `x`.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`.
        scale: f32[] or f32[1], the factor of x.
        dtype: float8_e4m3fn or float8_e5m2.
        rows, cols: the numbers of dimensions that m and n stand for.
        amax, with_amax: see `quantize`.
        column_sums: whether to return `jnp.sum(x.astype(f32), axis=-2)` too: the
            gradient of a bias, if x is the gradient of an output.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` of `dtype`;
        amax as from `quantize`. With `column_sums` also the sums, f32 `[..., n]`, which
        a NaN or Inf enters as any sum; every run gives the same bytes.

    Raises:
        TypeError: x, scale, amax or dtype has another dtype; column_sums is no bool; or
            the op is differentiated.
        ValueError: x has fewer dimensions than `rows + cols`, or scale or amax has
            another shape.
    """
    op = "quantize_transpose"
    x = _checks.high_precision(op, "x", x, rows + cols)
    return QuantizeTranspose.quantize(
        x,
        scale,
        (),
        amax,
        dtype,
        with_amax=with_amax,
        column_sums=_checks.flag(op, "column_sums", column_sums),
        rows=rows,
        cols=cols,
    )


class QuantizeTranspose(Quantization):
    name = "quantize_transpose"
    amax_place = 2
    cpu = Quantization.cuda

    def canonical(self, shape, parts):
        # A single matrix needs no group dimension.
        sizes = super().canonical(shape, parts)
        return sizes if self.vmap_dims or parts[0] else sizes[1:]


class Producer(Quantization):
    """An op whose kernel for GPUs computes the values too."""

    def cpu(self, *operands):
        # XLA's CPU compiler vectorises a producer well; the custom call does the rest.
        arrays, scalars = self.split(*operands)
        cls = QuantizeTranspose if self.transpose else Quantize
        results = self.transpose, self.with_amax, self.column_sums
        sizes = self.rows, self.cols
        op = cls(self.dtype, *results, *sizes, vmap_dims=self.vmap_dims)
        return op(self.produce(*arrays), *scalars)
