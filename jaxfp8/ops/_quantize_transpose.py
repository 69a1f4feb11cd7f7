"""quantize_transpose: FP8 codes in both layouts, and the amax, in one read; and
`Producer`, which computes x too.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES
from . import _checks, _quantize, _shapes
from ._primitive import ONE, dims

# The custom call gives a sum for each run of this many rows (common/column_sums.h); XLA
# adds the sums up.
_SUMMED_ROWS = 128


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
    x = _checks.rank(op, "x", _checks.high_precision(op, "x", x), rows + cols)
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


class Producer(_quantize.Quantization):
    """An op that quantizes what it computes from x and `more`, in both layouts.

    The primitive takes `(x, scale, *more, *amax_so_far)`. The results are data; data_t
    if `transpose`; the amax if `with_amax`, at least `amax_so_far` where that is given;
    and the sums over rows if `column_sums`, which needs `transpose`. `m` stands for
    `rows` dimensions, `n` for those of `columns`. The custom call takes and returns the
    same arrays in its canonical form.

    A producer is a function in jnp, from the operands to f32 `[..., m, *n]`: where no
    kernel fuses producer and quantization, this function runs before the quantization.

    Attributes:
        is_fused: whether the custom call computes the values too.
    """

    is_fused = True

    def columns(self):
        """Return the names of the columns of the result, which are the last dimensions
        of x.
        """
        return dims("col", self.cols)

    def column_sizes(self, x):
        """Return the sizes of the columns of the result."""
        return x.shape[x.ndim - self.cols :]

    def operand_names(self, batch, row, col):
        """Return the names of x and `more`, given those of the result; `batch` are
        dimensions of x beyond them.
        """
        raise NotImplementedError

    def produce(self, x, *more):
        """Compute the values in jnp, f32 `[..., m, n]`."""
        raise NotImplementedError

    def canonical(self, x, *more):
        """Return `(x, *more)` as the custom call takes them, and its attributes."""
        raise NotImplementedError

    @classmethod
    def quantize(cls, x, scale, more, amax, dtype, **options):
        """Check the arguments that all producers take, and bind the primitive; the
        options are the fields of the op.

        Returns:
            `(data, data_t, amax)`, the amax in the shape of the argument; None for
            data_t without `transpose` and for the amax without `with_amax`. With
            `column_sums` also the sums.
        """
        operands = _checks.quantizer_operands(cls.name, scale, amax)
        dtype = _checks.dtype(cls.name, "dtype", dtype, FP8_DTYPES)
        op = cls(dtype, **options)
        scale, *amax_so_far = operands
        data, *rest = op(x, scale, *more, *amax_so_far)
        data_t = rest.pop(0) if op.transpose else None
        new_amax = rest.pop(0) if op.with_amax else None
        return data, data_t, _quantize.returned_amax(amax, new_amax), *rest

    def names(self, x, *ranks):
        col, row = self.columns(), dims("row", self.rows)
        # x may have dimensions that the result lacks, such as the pair of a gated
        # activation. So its rank is compared with that of its names.
        batch = dims("batch", x - len(self._names_without_batch()[0]))
        x_names, *more_names = self.operand_names(batch, row, col)
        _, amax_so_far = self._split(ranks[1:])
        results = [batch + row + col]
        results += [batch + col + row] * self.transpose + [ONE] * self.with_amax
        # The sums lack the rows, so a mesh that cuts rows adds up the sums of its
        # devices.
        results += [batch + col] * self.column_sums
        return [x_names, ONE, *more_names, *[ONE] * len(amax_so_far)], results

    def _names_without_batch(self):
        return self.operand_names((), dims("row", self.rows), self.columns())

    def _split(self, rest):
        """Return `more` and `amax_so_far`."""
        count = len(self._names_without_batch()) - 1
        return rest[:count], rest[count:]

    def reference(self, *operands):
        # The values stay in f32, as in the kernel: another rounding would give other
        # codes.
        return self.quantized(*self._produced(operands))

    def _produced(self, operands):
        """Return the values, the scale and `amax_so_far`."""
        x, scale, *rest = operands
        more, amax_so_far = self._split(rest)
        values = self.produce(x, *more)
        return values, scale, *amax_so_far

    def cpu(self, *operands):
        # XLA's CPU compiler vectorises a producer well; the custom call does the rest.
        cls = QuantizeTranspose if self.transpose else _quantize.Quantize
        results = self.transpose, self.with_amax, self.column_sums
        sizes = self.rows, self.cols
        op = cls(self.dtype, *results, *sizes, vmap_dims=self.vmap_dims)
        return op(*self._produced(operands))

    def cuda(self, x, scale, *rest):
        """Make the custom call of this op, in its canonical form."""
        more, amax_so_far = self._split(rest)
        # Results take their sizes from x as it comes in: `canonical` reshapes it.
        first = x.ndim - len(self._names_without_batch()[0])
        leading, row = x.shape[:first], x.shape[first : first + self.rows]
        col = self.column_sizes(x)
        m, n, batch = map(math.prod, (row, col, leading[self.vmap_dims :]))
        (x, *more), attributes = self.canonical(x, *more)
        # A single matrix needs no group dimension, but the fused producers have one
        # always.
        groups = x.shape[:1] if self.is_fused or leading else ()
        results = [((*groups, m, n), self.dtype)]
        results += [((*groups, n, m), self.dtype)] * self.transpose
        sums = (*groups, -(-m // _SUMMED_ROWS), n), jnp.float32
        (data, *rest), amax = self.call(
            results + [sums] * self.column_sums,
            *(x, scale, amax_so_far, *more),
            # Results that may be left out come after the amax: the sums, and data_t of
            # a producer.
            place=1 if self.is_fused else 2,
            batch=batch,
            **attributes,
        )
        outputs = [data.reshape(*leading, *row, *col)]
        if self.transpose:
            outputs.append(rest[0].reshape(*leading, *col, *row))
        outputs += amax
        if self.column_sums:
            outputs.append(jnp.sum(rest[-1], axis=-2).reshape(*leading, *col))
        return outputs


class QuantizeTranspose(Producer):
    name = "quantize_transpose"
    is_fused = False

    def operand_names(self, batch, row, col):
        return [batch + row + col]

    def produce(self, x):
        return x

    def canonical(self, x):
        leading = x.ndim - self.rows - self.cols
        return (_shapes.merge_groups(x, leading, self.rows),), {}

    cpu = Producer.cuda
