"""Quantizing f32 values that an op computes itself: what the fused producers share.

Each is a function in jnp, from the operands to f32 `[..., m, n]`. As a custom call it is one with the quantization;
elsewhere it comes before it.

Counts of what saturates or becomes zero are not of the same pass on a GPU: there XLA computes the values once more, in
a kernel that reads the operands and writes the counts.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _ffi, _shapes
from ._primitive import ONE, dims, tensor_op
from ._quantize import COUNTED_SIZES, COUNTS, _quantize
from ._quantize_transpose import _quantize_transpose
from ._reference import count, encode


def producer_op(name: str, *, produce, names, canonical, col: str = "col"):
    """A primitive `(x, scale, amax, *more, dtype=, transpose=, rows=, **static) -> [data, amax, data_t if transpose]`.

    `m` is `rows` dimensions, `n` is one. The amax is at least the operand `amax`. The custom call takes and returns the
    same, in its canonical form, with the rest of `static` as attributes. With `counts=True` counts come last, as of
    `ops.quantize`.

    Args:
        name: of the op and of its custom call.
        produce: `(x, *more, members, **static) -> f32 [..., m, n]`, in jnp.
        names: `(batch, row, col, **static) -> names of x and more`, given the names of the dimensions of the result;
            what the rank of x has beyond them is `batch`.
        canonical: `(x, *more, members, rows, **static) -> (x, *more)` as the custom call takes them.
        col: the name of dimension n; "whole" where no mesh may cut it.
    """

    n_name = dims(col, 1)

    def rank_of_x(rows, **static):
        """Without batch dimensions."""
        return len(names((), dims("row", rows), n_name, **static)[0])

    def all_names(x, *ranks, dtype, transpose, rows, counts=False, **static):
        del dtype, ranks
        batch, row = dims("batch", x - rank_of_x(rows, **static)), dims("row", rows)
        results = [batch + row + n_name, ONE, *[batch + n_name + row] * transpose, *[COUNTS] * counts]
        of_x, *of_more = names(batch, row, n_name, **static)
        return [of_x, ONE, ONE, *of_more], results

    def counted(values, scale, dtype, members):
        return count(values, _shapes.stretch(scale, values), dtype, tuple(range(members, values.ndim)))

    def reference(x, scale, amax, *more, members, dtype, transpose, rows, counts=False, **static):
        values = produce(x, *more, members=members, **static)
        data = encode(values, _shapes.stretch(scale, values), dtype)
        first = data.ndim - rows - 1
        order = (*range(first), data.ndim - 1, *range(first, data.ndim - 1))
        outputs = [data, _shapes.raise_amax(amax, _shapes.abs_max(values, members))]
        outputs += [jnp.transpose(data, order)] if transpose else []
        return outputs + [counted(values, scale, dtype, members)] if counts else outputs

    def cpu(x, scale, amax, *more, members, dtype, transpose, rows, counts=False, **static):
        """XLA's CPU compiler vectorises the producer well; the custom call does the rest."""
        counting = {"counts": True} if counts else {}
        values = produce(x, *more, members=members, **static)
        if transpose:
            options = {"dtype": dtype, "rows": rows, "cols": 1, "column_sums": False} | counting
            data, data_t, top, *of_all = _quantize_transpose(values, scale, amax, members=members, **options)
            return [data, top, data_t, *of_all]
        return _quantize(values, scale, amax, dtype=dtype, members=members, **counting)

    def cuda(x, scale, amax, *more, members, dtype, transpose, rows, counts=False, **static):
        first = x.ndim - rank_of_x(rows, **static)
        leading, row, n = x.shape[:first], x.shape[first : first + rows], x.shape[-1]
        g, m, batch = math.prod(leading), math.prod(row), math.prod(leading[members:])
        results = [((g, m, n), dtype), ((g,), jnp.float32)] + [((g, n, m), dtype)] * transpose
        of_all = [counted(produce(x, *more, members=members, **static), scale, dtype, members)] if counts else []
        scale, amax = _shapes.group_scales(scale, members, batch), _shapes.group_amaxes(amax, batch)
        x, *more = canonical(x, *more, members=members, rows=rows, **static)
        attributes = {key: np.float32(value) if isinstance(value, float) else value for key, value in static.items()}
        data, top, *data_t = _ffi.call(name, results, x, scale, amax, *more, aliases={2: 1}, **attributes)
        outputs = [data.reshape(*leading, *row, n), _shapes.member_amaxes(top, leading[:members], batch)]
        return outputs + [d.reshape(*leading, n, *row) for d in data_t] + of_all

    return tensor_op(
        name,
        names=all_names,
        dtypes=lambda *_, dtype, transpose, counts=False, **__: (
            [dtype, np.float32] + [dtype] * transpose + [np.float32] * counts
        ),
        reference=reference,
        cpu=cpu,
        cuda=cuda,
        combine=lambda transpose, counts=False, **_: [lax.pmax] * (2 + transpose) + [lax.psum] * counts,
        sizes=lambda *_, **__: COUNTED_SIZES,
    )
