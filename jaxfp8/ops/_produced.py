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


def producer_op(name: str, *, produce, names, canonical):
    """A primitive `(x, scale, *more, *so_far, dtype=, transpose=, rows=, with_amax=, **static) -> results`.

    The results are data, data_t if `transpose` and the amax if `with_amax`: at least `so_far`, where that is given. `m`
    is `rows` dimensions, `n` is one. The custom call takes and returns the same, in its canonical form, with `static`
    as attributes.

    Args:
        name: of the op and of its custom call.
        produce: `(x, *more, members, **static) -> f32 [..., m, n]`, in jnp.
        names: `(batch, row, col, **static) -> names of x and more`, given the names of the dimensions of the result;
            what the rank of x has beyond them is `batch`.
        canonical: `(x, *more, members, rows, **static) -> (x, *more), attributes` as the custom call takes them.
    """

    col = dims("col", 1)

    def names_without_batch(rows, static):
        return names((), dims("row", rows), col, **static)

    def split(rest, rows, static):
        """`more` and `so_far`."""
        count = len(names_without_batch(rows, static)) - 1
        return rest[:count], rest[count:]

    def all_names(x, *ranks, dtype, transpose, rows, with_amax, **static):
        del dtype
        batch, row = dims("batch", x - len(names_without_batch(rows, static)[0])), dims("row", rows)
        of_x, *of_more = names(batch, row, col, **static)
        _, so_far = split(ranks[1:], rows, static)
        results = [batch + row + col, *[batch + col + row] * transpose, *[ONE] * with_amax]
        return [of_x, ONE, *of_more, *[ONE] * len(so_far)], results

    def reference(x, scale, *rest, members, dtype, transpose, rows, with_amax, **static):
        more, so_far = split(rest, rows, static)
        values = produce(x, *more, members=members, **static)
        data = encode(values, _shapes.stretch(scale, values), dtype)
        first = data.ndim - rows - 1
        order = (*range(first), data.ndim - 1, *range(first, data.ndim - 1))
        outputs = [data, *([jnp.transpose(data, order)] if transpose else [])]
        return outputs + [_shapes.raise_amax(_shapes.abs_max(values, members), *so_far)] if with_amax else outputs

    def cpu(x, scale, *rest, members, dtype, transpose, rows, with_amax, **static):
        """XLA's CPU compiler vectorises the producer well; the custom call does the rest."""
        more, so_far = split(rest, rows, static)
        values = produce(x, *more, members=members, **static)
        options = {"dtype": dtype, "members": members, "with_amax": with_amax}
        if not transpose:
            return _quantize(values, scale, *so_far, **options)
        return _quantize_transpose(values, scale, *so_far, rows=rows, cols=1, column_sums=False, **options)

    def cuda(x, scale, *rest, members, dtype, transpose, rows, with_amax, **static):
        more, so_far = split(rest, rows, static)
        first = x.ndim - len(names_without_batch(rows, static)[0])
        leading, row, n = x.shape[:first], x.shape[first : first + rows], x.shape[-1]
        g, m, batch = math.prod(leading), math.prod(row), math.prod(leading[members:])
        amax, amax_result = _shapes.amax_buffers(so_far, with_amax, g, batch)
        results = [((g, m, n), dtype), amax_result] + [((g, n, m), dtype)] * transpose
        (x, *more), attributes = canonical(x, *more, members=members, rows=rows, **static)
        operands = x, _shapes.group_scales(scale, members, batch), amax, *more
        aliases = {2: 1} if so_far else None
        data, top, *data_t = _ffi.call(name, results, *operands, aliases=aliases, **attributes)
        outputs = [data.reshape(*leading, *row, n), *(d.reshape(*leading, n, *row) for d in data_t)]
        return outputs + [_shapes.member_amaxes(top, leading[:members], batch)] if with_amax else outputs

    return tensor_op(
        name,
        names=all_names,
        dtypes=lambda *_, dtype, transpose, with_amax, **__: [dtype] * (1 + transpose) + [np.float32] * with_amax,
        reference=reference,
        cpu=cpu,
        cuda=cuda,
        combine=lambda **_: lax.pmax,
    )


def produced(op, x, scale, more, amax, *, dtype, transpose, with_amax, **static):
    """Calls the primitive of a producer: `(data, data_t, amax)`, None in place of what is not wanted."""
    so_far = [] if amax is None else [amax]
    data, *rest = op(x, scale, *more, *so_far, dtype=dtype, transpose=transpose, with_amax=with_amax, **static)
    data_t = rest.pop(0) if transpose else None
    return data, data_t, rest[0].reshape(()) if with_amax else None
