"""Ops that quantize in both layouts in one custom call: quantize_transpose, and fused producers, which compute x too.

Each producer is a function in jnp, from the operands to f32 `[..., m, *n]`. Where no kernel fuses producer and
quantization, this function runs before the quantization.
"""

import math

import jax.numpy as jnp

from ..numerics import FP8_DTYPES
from . import _checks, _quantize, _shapes
from ._primitive import ONE, dims, tensor_op

# The custom call gives a sum for each run of this many rows (common/column_sums.h); XLA adds the sums up.
_SUMMED_ROWS = 128


def producer_op(name: str, *, names, canonical, columns=lambda **static: dims("col", 1), produce=None):
    """Make the primitive of an op that quantizes what it computes from x and `more`.

    The primitive takes `(x, scale, *more, *amax_so_far)`. The results are data; data_t if `transpose`; the amax if
    `with_amax`, at least `amax_so_far` where that is given; and the sums over rows if `column_sums`, which needs
    `transpose`. `m` stands for `rows` dimensions, `n` for those of `columns`. The custom call takes and returns the
    same arrays in its canonical form, with `static` as attributes.

    Args:
        name: the name of the op and of its custom call.
        names: `(batch, row, col, **static) -> names of x and more`, given the names of the dimensions of the result;
            `batch` names the dimensions that x has beyond them.
        canonical: `(x, *more, vmap_dims, rows, **static) -> (x, *more), attributes` as the custom call takes them.
        columns: `(**static) -> names` of the columns of the result, which are the last dimensions of x.
        produce: `(x, *more, vmap_dims, **static) -> f32 [..., m, n]`, in jnp; None where x itself is quantized.
    """

    def names_without_batch(rows, static):
        return names((), dims("row", rows), columns(**static), **static)

    def split(rest, rows, static):
        """Return `more` and `amax_so_far`."""
        count = len(names_without_batch(rows, static)) - 1
        return rest[:count], rest[count:]

    def all_names(x, *ranks, dtype, transpose, rows, with_amax, column_sums, **static):
        col = columns(**static)
        # x may have dimensions that the result lacks, such as the pair of a gated activation. So its rank is compared
        # with that of its names.
        batch, row = dims("batch", x - len(names_without_batch(rows, static)[0])), dims("row", rows)
        x_names, *more_names = names(batch, row, col, **static)
        _, amax_so_far = split(ranks[1:], rows, static)
        results = [batch + row + col, *[batch + col + row] * transpose, *[ONE] * with_amax]
        # The sums lack the rows, so a mesh that cuts rows adds up the sums of its devices.
        results += [batch + col] * column_sums
        return [x_names, ONE, *more_names, *[ONE] * len(amax_so_far)], results

    def unfused(quantize, quantize_transpose):
        """Return an implementation that computes the values in jnp before it quantizes them."""

        def run(x, scale, *rest, vmap_dims, dtype, transpose, rows, with_amax, column_sums, **static):
            more, amax_so_far = split(rest, rows, static)
            # The values stay in f32, as in the kernel: another rounding would give other codes.
            values = x if produce is None else produce(x, *more, vmap_dims=vmap_dims, **static)
            options = {"dtype": dtype, "vmap_dims": vmap_dims, "with_amax": with_amax}
            if not transpose:
                return quantize(values, scale, *amax_so_far, **options)
            options |= {"transpose": True, "rows": rows, "cols": len(columns(**static)), "column_sums": column_sums}
            return quantize_transpose(values, scale, *amax_so_far, **options)

        return run

    def custom_call(x, scale, *rest, vmap_dims, dtype, transpose, rows, with_amax, column_sums, **static):
        more, amax_so_far = split(rest, rows, static)
        # Results take their sizes from x as it comes in: `canonical` reshapes it.
        first = x.ndim - len(names_without_batch(rows, static)[0])
        leading, row = x.shape[:first], x.shape[first : first + rows]
        col = x.shape[x.ndim - len(columns(**static)) :]
        m, n, batch = map(math.prod, (row, col, leading[vmap_dims:]))
        (x, *more), attributes = canonical(x, *more, vmap_dims=vmap_dims, rows=rows, **static)
        # A single matrix needs no group dimension, but the fused producers have one always.
        groups = x.shape[:1] if produce is not None or leading else ()
        # Results that may be left out come after the amax: the sums, and data_t of a producer.
        layouts = [((*groups, m, n), dtype), *[((*groups, n, m), dtype)] * transpose]
        count = len(layouts) if produce is None else 1
        sums = [((*groups, -(-m // _SUMMED_ROWS), n), jnp.float32)] * column_sums
        options = {"vmapped": leading[:vmap_dims], "with_amax": with_amax, "batch": batch, **attributes}
        before, amax, after = _quantize.call(
            name, x, scale, amax_so_far, *more, data=layouts[:count], after=layouts[count:] + sums, **options
        )
        data, *rest = *before, *after
        data_t = [codes.reshape(*leading, *col, *row) for codes in rest[:transpose]]
        sums = [jnp.sum(parts, axis=-2).reshape(*leading, *col) for parts in rest[transpose:]]
        return [data.reshape(*leading, *row, *col), *data_t, *amax, *sums]

    return tensor_op(
        name,
        names=all_names,
        dtypes=lambda *_, dtype, transpose, with_amax, column_sums, **__: (
            [dtype] * (1 + transpose) + [jnp.float32] * (with_amax + column_sums)
        ),
        reference=unfused(_quantize.reference, _quantize.reference),
        # XLA's CPU compiler vectorises a producer well; the custom call does the rest.
        cpu=custom_call if produce is None else unfused(_quantize._quantize, quantize_transpose),
        cuda=custom_call,
    )


quantize_transpose = producer_op(
    "quantize_transpose",
    names=lambda batch, row, col, cols: [batch + row + col],
    columns=lambda cols: dims("col", cols),
    canonical=lambda x, vmap_dims, rows, cols: ((_shapes.merge_groups(x, x.ndim - rows - cols, rows),), {}),
)


def produced(op, name, x, scale, more, amax, *, dtype, transpose, with_amax, column_sums=False, **static):
    """Check the arguments that all these ops take, and call the primitive.

    Returns:
        `(data, data_t, amax)`, the amax in the shape of the argument; None for data_t without `transpose` and for the
        amax without `with_amax`. With `column_sums` also the sums.
    """
    scale, *amax_so_far = _checks.quantizer_operands(name, scale, amax)
    dtype, transpose = _checks.dtype(name, "dtype", dtype, FP8_DTYPES), bool(transpose)
    options = {"dtype": dtype, "transpose": transpose, "with_amax": with_amax, "column_sums": column_sums}
    data, *rest = op(x, scale, *more, *amax_so_far, **options, **static)
    data_t = rest.pop(0) if transpose else None
    return data, data_t, _quantize.returned_amax(amax, rest.pop(0) if with_amax else None), *rest
