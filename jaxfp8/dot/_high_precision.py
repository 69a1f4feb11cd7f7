"""Products of QTensors that no FP8 kernel multiplies: by a user's own function, or
dequantized in high precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from .._jax import _mesh
from ..ops import _shapes
from ..recipes import QTensor, dequantized, value_of
from . import _contexts
from ._compute_dtype import not_wider, promoted

_SCALE_DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.float8_e8m0fnu))


def is_blockwise(q: QTensor) -> bool:
    """Tell whether q is FP8 with a scale for each block; a tensor with one scale is one
    block.
    """
    if not q.is_fp8 or q.block is None:
        return q.is_tensorwise
    return q.scale_inv.dtype in _SCALE_DTYPES


def multiply_by_jax(product, x, kernel, bias, group_sizes, precision, dtype):
    """Multiply operands, `(array, codes or None)`, in `dtype`, by JAX's own product."""
    y = product.multiply_arrays(
        value_of(*x, dtype),
        value_of(*kernel, dtype),
        group_sizes,
        precision,
        wide(product.out_dtype, bias),
    )
    return plus(y, bias, 0, product.out_dtype)


def multiply_dequantized(a, b, out_dtype, batch, bias):
    """Multiply the values of two QTensors."""
    ends = a.ndim - a.cols, b.ndim - b.cols  # of batch dimensions and rows
    contract = tuple(range(ends[0], a.ndim)), tuple(range(ends[1], b.ndim))
    leading = tuple(range(batch))

    def multiply(a, b):
        return lax.dot_general(
            a,
            b,
            (contract, (leading, leading)),
            preferred_element_type=promoted(a, wide(out_dtype, bias)),
            out_sharding=_out_sharding(a, b, batch, ends),
        )

    return plus(multiply_values(multiply, a, b, out_dtype), bias, batch, out_dtype)


def multiply_values(multiply, a, b, out_dtype, *operands):
    """Return `multiply(a, b, *operands)` of the values of two QTensors: in float32, or
    for two QTensors without codes in the dtype of the result where theirs is not
    narrower.

    Codes, and an operand beside codes, are widened to float32.
    """
    plain, values = [], []
    for q in (a, b):
        if q.scale_inv is None:
            plain.append(q.data.dtype)
            values.append(q.data)
        else:
            values.append(dequantized(q.data, q.scale_inv, q.block, q.cols))
    dtype = not_wider(out_dtype, *plain) if len(plain) == 2 else jnp.float32
    why = "no FP8 product takes these codes and scales"
    if plain:
        why = f"the recipe keeps an operand in {plain[0]}"
    with _contexts.high_precision(why):
        return multiply(*[value.astype(dtype) for value in values], *operands)


def wide(out_dtype, bias):
    """Return the dtype of a product to which a bias is added in float32, so that the
    sum is rounded only once.
    """
    return out_dtype if bias is None else np.dtype(np.float32)


def _out_sharding(a, b, batch, ends):
    """Return the sharding of a product whose contracted dimensions a mesh with explicit
    axes may cut, where JAX does not choose; None elsewhere.

    The dimensions that are not contracted keep their axes, as in FP8 products.
    """
    mesh = jax.typeof(a).sharding.mesh
    if not mesh.explicit_axes:
        return None
    rows, cols = jax.typeof(a).sharding.spec, jax.typeof(b).sharding.spec
    return NamedSharding(mesh, _mesh.once([*rows[: ends[0]], *cols[batch : ends[1]]]))


def multiply_by(qgemm, a, b, gemm_type, out_dtype, batch, bias, swap):
    """Multiply by a user's own function `qgemm`, which multiplies matrices."""
    rows = [q.shape[batch : q.ndim - q.cols] for q in (a, b)]
    leading = a.shape[:batch]
    dtype = wide(out_dtype, bias)

    def multiply(a, b):
        y = qgemm(
            a.data,
            b.data,
            sx=a.scale_inv,
            sw=b.scale_inv,
            out_dtype=dtype,
            gemm_type=gemm_type,
            qresult_x=a,
            qresult_w=b,
        )
        shape = (a.shape[0], b.shape[0])
        # Check the result here, where the message can name the user's function.
        got = getattr(y, "dtype", type(y)), getattr(y, "shape", ())
        if got != (dtype, shape):
            raise TypeError(
                f"{qgemm.__qualname__}: {gemm_type}: expected {dtype.name}{shape}, "
                f"got {got[0]}{got[1]}"
            )
        return y

    # A user's product multiplies matrices: batch dimensions are vmapped over it.
    a, b = _matrices(a, batch), _matrices(b, batch)
    for _ in range(batch):
        multiply = jax.vmap(multiply)
    why = "the recipe's qgemm multiplies something else than FP8"
    with _contexts.high_precision(why):
        y = multiply(a, b)
    # `qgemm` takes operands in the order of their roles, whatever `swap` is: transpose
    # the result.
    if swap:
        y, rows = y.mT, rows[::-1]
    return plus(y.reshape(*leading, *rows[0], *rows[1]), bias, batch, out_dtype)


def _matrices(q, batch: int) -> QTensor:
    """Merge the rows and the columns of q to one dimension each, and repeat one scale
    for the batch.
    """
    data = _shapes.merge(q.data, *[1] * batch, q.ndim - q.cols - batch)
    q = QTensor(data, q.scale_inv, block=q.block)
    if not q.has_one_scale:
        return q
    leading = data.shape[:batch]
    return q.map_scales(lambda scale: jnp.broadcast_to(scale, (*leading, *scale.shape)))


def plus(y, bias, batch, out_dtype):
    """Add a bias of y's batch and last dimensions, or None, to y in float32, and round
    once to `out_dtype`.
    """
    if bias is not None:
        rows = (1,) * (y.ndim - bias.ndim)
        shape = *bias.shape[:batch], *rows, *bias.shape[batch:]
        y = y.astype(jnp.float32) + bias.astype(jnp.float32).reshape(shape)
    return y.astype(out_dtype)
