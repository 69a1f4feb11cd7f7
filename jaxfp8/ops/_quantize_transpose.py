"""quantize_transpose: FP8 codes in both layouts, and the amax, in one read; and
`Producer`, which computes x too.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..numerics import FP8_DTYPES
from . import _checks, _quantize, _shapes
from ._primitive import ONE, Op, dims

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
    return _quantize_transpose.quantize(
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


class Producer(Op):
    """An op that quantizes what it computes from x and `more`, in both layouts; its
    spec is a `QuantizeSpec`.

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

    def columns(self, spec):
        """Return the names of the columns of the result, which are the last dimensions
        of x.
        """
        return dims("col", spec.cols)

    def operand_names(self, batch, row, col, spec):
        """Return the names of x and `more`, given those of the result; `batch` are
        dimensions of x beyond them.
        """
        raise NotImplementedError

    def produce(self, x, *more, vmap_dims, spec):
        """Compute the values in jnp, f32 `[..., m, n]`."""
        raise NotImplementedError

    def canonical(self, x, *more, vmap_dims, spec):
        """Return `(x, *more)` as the custom call takes them, and its attributes."""
        raise NotImplementedError

    def quantize(self, x, scale, more, amax, dtype, **options):
        """Check the arguments that all producers take, and bind the primitive; the
        options are those of `QuantizeSpec`.

        Returns:
            `(data, data_t, amax)`, the amax in the shape of the argument; None for
            data_t without `transpose` and for the amax without `with_amax`. With
            `column_sums` also the sums.
        """
        operands = _checks.quantizer_operands(self.name, scale, amax)
        dtype = _checks.dtype(self.name, "dtype", dtype, FP8_DTYPES)
        spec = _quantize.QuantizeSpec(dtype, **options)
        scale, *amax_so_far = operands
        data, *rest = self(x, scale, *more, *amax_so_far, spec=spec)
        data_t = rest.pop(0) if spec.transpose else None
        new_amax = rest.pop(0) if spec.with_amax else None
        return data, data_t, _quantize.returned_amax(amax, new_amax), *rest

    def names(self, x, *ranks, spec):
        col, row = self.columns(spec), dims("row", spec.rows)
        # x may have dimensions that the result lacks, such as the pair of a gated
        # activation. So its rank is compared with that of its names.
        batch = dims("batch", x - len(self._names_without_batch(spec)[0]))
        x_names, *more_names = self.operand_names(batch, row, col, spec)
        _, amax_so_far = self._split(ranks[1:], spec)
        results = [batch + row + col]
        results += [batch + col + row] * spec.transpose + [ONE] * spec.with_amax
        # The sums lack the rows, so a mesh that cuts rows adds up the sums of its
        # devices.
        results += [batch + col] * spec.column_sums
        return [x_names, ONE, *more_names, *[ONE] * len(amax_so_far)], results

    def _names_without_batch(self, spec):
        return self.operand_names((), dims("row", spec.rows), self.columns(spec), spec)

    def _split(self, rest, spec):
        """Return `more` and `amax_so_far`."""
        count = len(self._names_without_batch(spec)) - 1
        return rest[:count], rest[count:]

    def dtypes(self, *operands, spec):
        f32 = [jnp.float32] * (spec.with_amax + spec.column_sums)
        return [spec.dtype] * (1 + spec.transpose) + f32

    def reference(self, *operands, vmap_dims, spec):
        # The values stay in f32, as in the kernel: another rounding would give other
        # codes.
        produced = self._produced(operands, vmap_dims, spec)
        return _quantize.reference(*produced, vmap_dims=vmap_dims, spec=spec)

    def _produced(self, operands, vmap_dims, spec):
        """Return the values, the scale and `amax_so_far`."""
        x, scale, *rest = operands
        more, amax_so_far = self._split(rest, spec)
        values = self.produce(x, *more, vmap_dims=vmap_dims, spec=spec)
        return values, scale, *amax_so_far

    def cpu(self, *operands, vmap_dims, spec):
        # XLA's CPU compiler vectorises a producer well; the custom call does the rest.
        produced = self._produced(operands, vmap_dims, spec)
        op = _quantize_transpose if spec.transpose else _quantize.quantize_op
        spec = spec._replace(activation=None, has_beta=False)
        return op(*produced, vmap_dims=vmap_dims, spec=spec)

    def cuda(self, x, scale, *rest, vmap_dims, spec):
        """Make the custom call of this op, in its canonical form."""
        more, amax_so_far = self._split(rest, spec)
        # Results take their sizes from x as it comes in: `canonical` reshapes it.
        first = x.ndim - len(self._names_without_batch(spec)[0])
        leading, row = x.shape[:first], x.shape[first : first + spec.rows]
        col = x.shape[x.ndim - spec.cols :]
        m, n, batch = map(math.prod, (row, col, leading[vmap_dims:]))
        (x, *more), attributes = self.canonical(
            x, *more, vmap_dims=vmap_dims, spec=spec
        )
        # A single matrix needs no group dimension, but the fused producers have one
        # always.
        groups = x.shape[:1] if self.is_fused or leading else ()
        results = [((*groups, m, n), spec.dtype)]
        results += [((*groups, n, m), spec.dtype)] * spec.transpose
        sums = (*groups, -(-m // _SUMMED_ROWS), n), jnp.float32
        (data, *rest), amax = _quantize.call(
            self.name,
            results + [sums] * spec.column_sums,
            *(x, scale, amax_so_far, *more),
            vmapped=leading[:vmap_dims],
            with_amax=spec.with_amax,
            # Results that may be left out come after the amax: the sums, and data_t of
            # a producer.
            place=1 if self.is_fused else 2,
            batch=batch,
            **attributes,
        )
        outputs = [data.reshape(*leading, *row, *col)]
        if spec.transpose:
            outputs.append(rest[0].reshape(*leading, *col, *row))
        outputs += amax
        if spec.column_sums:
            outputs.append(jnp.sum(rest[-1], axis=-2).reshape(*leading, *col))
        return outputs


class _QuantizeTranspose(Producer):
    name = "quantize_transpose"
    is_fused = False

    def operand_names(self, batch, row, col, spec):
        return [batch + row + col]

    def produce(self, x, vmap_dims, spec):
        return x

    def canonical(self, x, vmap_dims, spec):
        leading = x.ndim - spec.rows - spec.cols
        return (_shapes.merge_groups(x, leading, spec.rows),), {}

    cpu = Producer.cuda


_quantize_transpose = _QuantizeTranspose()
