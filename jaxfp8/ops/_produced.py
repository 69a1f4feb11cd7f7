"""Fused producers: ops that compute f32 values and quantize them in the same custom call.

Each producer is a function in jnp, from the operands to f32 `[..., m, n]`. Where no kernel fuses the two, the function
runs before the quantization.
"""

import math

import jax.numpy as jnp

from ..numerics import FP8_DTYPES
from . import _checks, _quantize, _quantize_transpose
from ._primitive import ONE, dims, tensor_op


def producer_op(name: str, *, produce, names, canonical):
    """Make a primitive `(x, scale, *more, *amax_so_far, dtype=, transpose=, rows=, with_amax=, **static) -> results`.

    The results are data, data_t if `transpose` and the amax if `with_amax`: at least `amax_so_far`, where that is
    given. `m` is `rows` dimensions, `n` is one. The custom call takes and returns the same, in its canonical form, with
    `static` as attributes.

    Args:
        name: of the op and of its custom call.
        produce: `(x, *more, vmap_dims, **static) -> f32 [..., m, n]`, in jnp.
        names: `(batch, row, col, **static) -> names of x and more`, given the names of the dimensions of the result;
            `batch` names the dimensions that x has beyond them.
        canonical: `(x, *more, vmap_dims, rows, **static) -> (x, *more), attributes` as the custom call takes them.
    """
    col = dims("col", 1)

    def names_without_batch(rows, static):
        return names((), dims("row", rows), col, **static)

    def split(rest, rows, static):
        """Return `more` and `amax_so_far`."""
        count = len(names_without_batch(rows, static)) - 1
        return rest[:count], rest[count:]

    def all_names(x, *ranks, dtype, transpose, rows, with_amax, **static):
        del dtype
        # x may have dimensions that the result lacks, such as the pair of a gated activation. So its rank is compared
        # with that of its names.
        batch, row = dims("batch", x - len(names_without_batch(rows, static)[0])), dims("row", rows)
        x_names, *more_names = names(batch, row, col, **static)
        _, amax_so_far = split(ranks[1:], rows, static)
        results = [batch + row + col, *[batch + col + row] * transpose, *[ONE] * with_amax]
        return [x_names, ONE, *more_names, *[ONE] * len(amax_so_far)], results

    def unfused(quantize, transpose_quantize):
        """Return an implementation that computes the values in jnp before it quantizes them."""

        def run(x, scale, *rest, vmap_dims, dtype, transpose, rows, with_amax, **static):
            more, amax_so_far = split(rest, rows, static)
            # The values stay in f32, as in the kernel: another rounding would give other codes.
            values = produce(x, *more, vmap_dims=vmap_dims, **static)
            options = {"dtype": dtype, "vmap_dims": vmap_dims, "with_amax": with_amax}
            if not transpose:
                return quantize(values, scale, *amax_so_far, **options)
            return transpose_quantize(values, scale, *amax_so_far, rows=rows, cols=1, column_sums=False, **options)

        return run

    def cuda(x, scale, *rest, vmap_dims, dtype, transpose, rows, with_amax, **static):
        more, amax_so_far = split(rest, rows, static)
        # Results take their sizes from x as it comes in: `canonical` reshapes it.
        first = x.ndim - len(names_without_batch(rows, static)[0])
        leading, row, n = x.shape[:first], x.shape[first : first + rows], x.shape[-1]
        g, m, batch = math.prod(leading), math.prod(row), math.prod(leading[vmap_dims:])
        (x, *more), attributes = canonical(x, *more, vmap_dims=vmap_dims, rows=rows, **static)
        options = {"vmapped": leading[:vmap_dims], "with_amax": with_amax, "batch": batch}
        layouts = [((g, m, n), dtype)], [((g, n, m), dtype)] * transpose
        # The custom call has data_t last, because it may be left out; the op has it beside data.
        (data,), amax, data_t = _quantize.call(
            name, x, scale, amax_so_far, *more, data=layouts[0], after=layouts[1], **options, **attributes
        )
        return [data.reshape(*leading, *row, n), *(codes.reshape(*leading, n, *row) for codes in data_t), *amax]

    return tensor_op(
        name,
        names=all_names,
        dtypes=lambda *_, dtype, transpose, with_amax, **__: [dtype] * (1 + transpose) + [jnp.float32] * with_amax,
        reference=unfused(_quantize.reference, _quantize_transpose._reference),
        # XLA's CPU compiler vectorises the producer well; the custom call does the rest.
        cpu=unfused(_quantize._quantize, _quantize_transpose._quantize_transpose),
        cuda=cuda,
    )


def produced(op, name, x, scale, more, amax, *, dtype, transpose, with_amax, **static):
    """Check what all producers take and call the primitive: `(data, data_t, amax f32[1])`, None where not asked for."""
    scale, *amax_so_far = _checks.quantizer_operands(name, scale, amax)
    dtype, transpose = _checks.dtype(name, "dtype", dtype, FP8_DTYPES), bool(transpose)
    options = {"dtype": dtype, "transpose": transpose, "with_amax": with_amax}
    data, *rest = op(x, scale, *more, *amax_so_far, **options, **static)
    return data, rest.pop(0) if transpose else None, rest[0] if with_amax else None
