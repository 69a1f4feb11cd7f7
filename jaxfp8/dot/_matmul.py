"""matmul: the product of two QTensors, with one scale or many, with a user's codes, or in high precision."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from ..recipes import GEMMType, QTensor, dequantized
from . import _contexts
from ._compute_dtype import not_wider, promoted

_SCALE_DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.float8_e8m0fnu))


def matmul(a, b, *, gemm_type, qgemm, out_dtype, precise, batch, bias=None, swap=False):
    """Multiply `a @ b.T`, or with `swap` its transpose `b @ a.T`.

    Args:
        a: a QTensor `[*batch, *m, *k]`, whose columns are k. `a.data_t`, if any, is a layout that another product reads
            as well.
        b: a QTensor `[*batch, *n, *k]`.
        gemm_type: the GEMMType: fprop, dgrad or wgrad.
        qgemm: the product function of a user's quantizer, or None.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off.
        batch: the number of batch dimensions, which lead.
        bias: bfloat16, float16 or float32 `[*batch, *n]`, or None; not with swap.
        swap: whether to return the transpose.

    Returns:
        `[*batch, *m, *n]` of `out_dtype`; with swap `[*batch, *n, *m]`.
    """
    if qgemm is not None:
        return _custom(a, b, gemm_type, qgemm, out_dtype, batch, bias, swap)
    # The transpose of a product is the product of the operands exchanged: no kernel has to transpose its result.
    if swap:
        a, b = b, a
    # Take the fastest kernel that reads both operands. Beside an operand with blocks, a tensor with one scale is a
    # matrix of one block; operands that no kernel reads are dequantized.
    if _is_tensorwise(a) and _is_tensorwise(b):
        return ops.scaled_matmul(
            a.data,
            b.data,
            a.scale_inv,
            b.scale_inv,
            a_t=a.data_t,
            b_t=b.data_t,
            bias=bias,
            out_dtype=out_dtype,
            precise=precise,
            batch=batch,
            contracting=a.cols,
            narrow_sums=gemm_type == GEMMType.WGRAD,
        )
    if is_blockwise(a) and is_blockwise(b):
        return ops.block_scaled_matmul(
            a.data,
            b.data,
            a.scale_inv,
            b.scale_inv,
            a_block=a.block,
            b_block=b.block,
            power_2_scale=a.power_2_scale and b.power_2_scale,
            bias=bias,
            out_dtype=out_dtype,
            precise=precise,
            batch=batch,
            contracting=a.cols,
        )
    return _dequantized(a, b, out_dtype, batch, bias)


def _is_tensorwise(q: QTensor) -> bool:
    """Tell whether q is FP8 with one scale."""
    return q.is_fp8 and q.has_one_scale


def is_blockwise(q: QTensor) -> bool:
    """Tell whether q is FP8 with a scale for each block; a tensor with one scale is one block."""
    return _is_tensorwise(q) or (q.is_fp8 and q.block is not None and q.scale_inv.dtype in _SCALE_DTYPES)


def _dequantized(a, b, out_dtype, batch, bias):
    """Multiply in float32, or two operands without codes in the dtype of the result where theirs is not narrower.

    Codes, and an operand beside codes, are widened to float32.
    """
    plain = [q.data.dtype for q in (a, b) if q.scale_inv is None]
    dtype = jnp.float32 if len(plain) < 2 else not_wider(out_dtype, *plain)
    leading = tuple(range(batch))
    contract = [tuple(range(q.ndim - q.cols, q.ndim)) for q in (a, b)]
    why = f"the recipe keeps an operand in {plain[0]}" if plain else "no FP8 product takes these codes and scales"
    a, b = (q.data if q.scale_inv is None else dequantized(q.data, q.scale_inv, q.block, q.cols) for q in (a, b))
    with _contexts.high_precision(why):
        numbers = contract, (leading, leading)
        wide = promoted(dtype, out_dtype if bias is None else jnp.float32)
        y = lax.dot_general(a.astype(dtype), b.astype(dtype), numbers, preferred_element_type=wide)
    return plus(y, bias, batch, out_dtype)


def _custom(a, b, gemm_type, qgemm, out_dtype, batch, bias, swap):
    """Multiply by a user's own product, of matrices."""
    rows = [q.shape[batch : q.ndim - q.cols] for q in (a, b)]
    leading = a.shape[:batch]
    # A bias is added to a product in float32, so that the sum is rounded only once.
    dtype = out_dtype if bias is None else jnp.dtype(jnp.float32)

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
        if getattr(y, "shape", None) != shape or y.dtype != dtype:
            result = f"{y.dtype}{y.shape}" if hasattr(y, "dtype") else repr(y)
            raise TypeError(f"{qgemm.__qualname__}: {gemm_type}: expected {dtype.name}{shape}, got {result}")
        return y

    def axes(q):
        """Return `in_axes` of an operand: 0 for each array that has the batch dimensions."""
        has_batch = q.scale_inv is not None and q.scale_inv.ndim > 1
        return dataclasses.replace(q, data=0, scale_inv=0 if has_batch else None)

    # A user's product multiplies matrices: batch dimensions are vmapped over it, and over the scales that have them.
    a, b = (_matrices(q, batch) for q in (a, b))
    for _ in range(batch):
        multiply = jax.vmap(multiply, in_axes=(axes(a), axes(b)))
    with _contexts.high_precision("the recipe's qgemm multiplies something else than FP8"):
        y = multiply(a, b)
    # `qgemm` takes operands in the order of their roles, whatever `swap` is: transpose the result.
    y = y.mT if swap else y
    first, second = reversed(rows) if swap else rows
    return plus(y.reshape(*leading, *first, *second), bias, batch, out_dtype)


def _matrices(q, batch: int) -> QTensor:
    """Merge the rows and the columns of q to one dimension each."""
    first = q.ndim - q.cols
    shape = (*q.shape[:batch], math.prod(q.shape[batch:first]), math.prod(q.shape[first:]))
    return QTensor(q.data.reshape(shape), q.scale_inv, block=q.block)


def plus(y, bias, batch, out_dtype):
    """Add a bias of y's batch and last dimensions, or None, to y in float32, and round once to `out_dtype`."""
    if bias is not None:
        rows = (1,) * (y.ndim - bias.ndim)
        bias = bias.astype(jnp.float32).reshape(*bias.shape[:batch], *rows, *bias.shape[batch:])
        y = y.astype(jnp.float32) + bias
    return y.astype(out_dtype)
