"""Quantizing f32 values that an op computes itself: what the fused producers share.

Each is a function in jnp, from the operands to f32 `[..., m, n]`. As a custom call it is one with the quantization;
elsewhere it comes before it.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _ffi, _shapes
from ._primitive import ONE, dims, tensor_op
from ._quantize import _quantize
from ._quantize_transpose import _quantize_transpose
from ._reference import encode


def producer_op(name: str, *, produce, names, canonical, col: str = "col"):
    """A primitive `(x, scale, amax, *more, dtype=, transpose=, rows=, **static) -> [data, amax, data_t if transpose]`.

    `m` is `rows` dimensions, `n` is one. The amax is at least the operand `amax`. The custom call takes and returns the
    same, in its canonical form, with the rest of `static` as attributes.

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

    def all_names(x, *ranks, dtype, transpose, rows, **static):
        del dtype, ranks
        batch, row = dims("batch", x - rank_of_x(rows, **static)), dims("row", rows)
        results = [batch + row + n_name, ONE, *[batch + n_name + row] * transpose]
        of_x, *of_more = names(batch, row, n_name, **static)
        return [of_x, ONE, ONE, *of_more], results

    def reference(x, scale, amax, *more, members, dtype, transpose, rows, **static):
        values = produce(x, *more, members=members, **static)
        data = encode(values, _shapes.stretch(scale, values), dtype)
        first = data.ndim - rows - 1
        order = (*range(first), data.ndim - 1, *range(first, data.ndim - 1))
        outputs = [data, _shapes.raise_amax(amax, _shapes.abs_max(values, members))]
        return outputs + [jnp.transpose(data, order)] if transpose else outputs

    def cpu(x, scale, amax, *more, members, dtype, transpose, rows, **static):
        """XLA's CPU compiler vectorises the producer well; the custom call does the rest."""
        values = produce(x, *more, members=members, **static)
        options = {"dtype": dtype, "members": members, "with_amax": True}
        if not transpose:
            return _quantize(values, scale, amax, **options)
        options |= {"rows": rows, "cols": 1, "column_sums": False}
        data, data_t, top = _quantize_transpose(values, scale, amax, **options)
        return [data, top, data_t]

    def cuda(x, scale, amax, *more, members, dtype, transpose, rows, **static):
        first = x.ndim - rank_of_x(rows, **static)
        leading, row, n = x.shape[:first], x.shape[first : first + rows], x.shape[-1]
        g, m, batch = math.prod(leading), math.prod(row), math.prod(leading[members:])
        results = [((g, m, n), dtype), ((g,), jnp.float32)] + [((g, n, m), dtype)] * transpose
        scale, amax = _shapes.group_scales(scale, members, batch), _shapes.group_amaxes(amax, batch)
        x, *more = canonical(x, *more, members=members, rows=rows, **static)
        attributes = {key: np.float32(value) if isinstance(value, float) else value for key, value in static.items()}
        data, top, *data_t = _ffi.call(name, results, x, scale, amax, *more, aliases={2: 1}, **attributes)
        outputs = [data.reshape(*leading, *row, n), _shapes.member_amaxes(top, leading[:members], batch)]
        return outputs + [d.reshape(*leading, n, *row) for d in data_t]

    return tensor_op(
        name,
        names=all_names,
        dtypes=lambda *_, dtype, transpose, **__: [dtype, np.float32] + [dtype] * transpose,
        reference=reference,
        cpu=cpu,
        cuda=cuda,
        combine=lambda **_: lax.pmax,
    )
