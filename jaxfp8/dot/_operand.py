"""Operands of the three products, and a product of any two: FP8 with one scale or many, a user's codes, or neither."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from ..numerics import FP8_DTYPES
from ..recipes import Block, GEMMType, QTensor, dequantized
from . import _marks

_SCALE_DTYPES = (np.dtype(jnp.float32), np.dtype(jnp.float8_e8m0fnu))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a product, with the contracting dimensions last.

    Attributes:
        codes: `[*batch, *rows, *contract]`; or the tensor itself, in high precision.
        scale_inv: f32[1], or `[*batch, rows / r, contract / c]` for matrices; None in high precision.
        other: the codes as `[*batch, *contract, *rows]`, where a mesh may move them in place of `codes`; or None.
        block, power_2_scale: see QTensor.
    """

    codes: jax.Array
    scale_inv: jax.Array | None
    other: jax.Array | None = None
    block: Block | None = dataclasses.field(default=None, metadata={"static": True})
    power_2_scale: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def has_one_scale(self) -> bool:
        """FP8 with one scale for all of it."""
        return self.is_fp8 and self.block is None and self.scale_inv.ndim <= 1

    @property
    def has_blocks(self) -> bool:
        """FP8 with a scale for each block, of which one scale for all is one."""
        is_known = self.block is not None and self.scale_inv.dtype in _SCALE_DTYPES
        return self.has_one_scale or (self.is_fp8 and is_known)

    @property
    def is_fp8(self) -> bool:
        """Whether it has codes, and of FP8."""
        return self.scale_inv is not None and self.codes.dtype in FP8_DTYPES

    def matrices(self, batch: int, contracting: int) -> "Operand":
        """With rows and contracting dimensions merged to one each."""
        shape, first = self.codes.shape, self.codes.ndim - contracting
        merged = (*shape[:batch], math.prod(shape[batch:first]), math.prod(shape[first:]))
        return dataclasses.replace(self, codes=self.codes.reshape(merged), other=None)

    def value(self, dtype, contracting: int):
        """What it stands for, in `dtype`."""
        if self.scale_inv is None:
            return self.codes.astype(dtype)
        return dequantized(self.codes, self.scale_inv, self.block, contracting).astype(dtype)


def operands(q: QTensor, batch: int, contract_first=False, want_last=True, want_first=True):
    """`(last, first)`: with the dimensions last that the first product contracts, and with them first; None if unread.

    Args:
        q: `[*batch, *rows, *cols]`; a tensor in high precision has no `scale_inv`.
        batch: how many dimensions come before the rows.
        contract_first: whether the rows are what the first product contracts (else the columns).
        want_last, want_first: what is read.
    """
    rowwise = Operand(q.data, q.scale_inv, None, q.block, q.power_2_scale)
    columnwise = None
    if want_last if contract_first else want_first:
        codes, scale_inv, block = q.data_t, q.scale_inv, None
        if codes is None:
            first = q.data.ndim - q.cols
            codes = jnp.transpose(q.data, (*range(batch), *range(first, q.data.ndim), *range(batch, first)))
        if q.scale_inv_t is not None:
            scale_inv, block = q.scale_inv_t, q.block
        elif scale_inv is not None and not q.has_one_scale:
            scale_inv, block = scale_inv.mT, None if q.block is None else q.block[::-1]
        columnwise = Operand(codes, scale_inv, None, block, q.power_2_scale)
    last, first = (columnwise, rowwise) if contract_first else (rowwise, columnwise)
    first = first if want_first else None
    if want_last and want_first and last.has_one_scale:
        # The backward reads the other layout: if codes have to cross devices, it is that one, once.
        last = dataclasses.replace(last, other=first.codes)
    return last if want_last else None, first


def matmul(
    a: Operand,
    b: Operand,
    *,
    gemm_type: GEMMType,
    qgemm,
    out_dtype,
    precise: bool,
    batch: int,
    contracting: int,
    bias=None,
    swap: bool = False,
):
    """`a @ b.T`, or its transpose `b @ a.T`, of `out_dtype`.

    Args:
        a: `[*batch, *m, *k]`.
        b: `[*batch, *n, *k]`.
        gemm_type: which product of a layer this is.
        qgemm: of the quantizer that has the product, or None.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off.
        batch: how many dimensions lead.
        contracting: how many dimensions `k` stands for.
        bias: bfloat16, float16 or float32 `[*batch, *n]`, or None; not with swap.
        swap: whether the transpose is wanted.

    Returns:
        `[*batch, *m, *n]`; with swap `[*batch, *n, *m]`.
    """
    if qgemm is not None:
        return _custom(a, b, gemm_type, qgemm, out_dtype, batch, contracting, bias, swap)
    if swap:
        a, b = b, a
    if a.has_one_scale and b.has_one_scale:
        options = {"bias": bias, "out_dtype": out_dtype, "precise": precise}
        layout = {"batch": batch, "contracting": contracting, "a_t": a.other, "b_t": b.other}
        return ops.scaled_matmul(a.codes, b.codes, a.scale_inv, b.scale_inv, **options, **layout)
    if a.has_blocks and b.has_blocks:
        options = {"bias": bias, "out_dtype": out_dtype, "precise": precise, "batch": batch, "contracting": contracting}
        blocks = {"a_block": a.block, "b_block": b.block, "power_2_scale": a.power_2_scale and b.power_2_scale}
        return ops.block_scaled_matmul(a.codes, b.codes, a.scale_inv, b.scale_inv, **blocks, **options)
    return _dequantized(a, b, out_dtype, batch, contracting, bias)


def _dequantized(a, b, out_dtype, batch, contracting, bias):
    """In float32; where neither operand has codes in their own dtype, or the result's if that is wider."""
    dtype = jnp.float32
    if a.scale_inv is None and b.scale_inv is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(a.codes, b.codes, out_dtype)
    leading = tuple(range(batch))
    contract = [tuple(range(x.codes.ndim - contracting, x.codes.ndim)) for x in (a, b)]
    kept = [x.codes.dtype for x in (a, b) if x.scale_inv is None]
    why = f"the recipe keeps an operand in {kept[0]}" if kept else "no FP8 product takes these codes and scales"
    a, b = (x.value(dtype, contracting) for x in (a, b))
    with _marks.high_precision(why):
        y = lax.dot_general(a, b, (contract, (leading, leading)))
    return _plus(y, bias, batch, out_dtype)


def _custom(a, b, gemm_type, qgemm, out_dtype, batch, contracting, bias, swap):
    """A user's own product, of matrices."""
    rows = [x.codes.shape[batch : x.codes.ndim - contracting] for x in (a, b)]
    leading = a.codes.shape[:batch]
    dtype = out_dtype if bias is None else jnp.dtype(jnp.float32)

    def of_matrices(a, b):
        qresult_x, qresult_w = (QTensor(x.codes, x.scale_inv, block=x.block) for x in (a, b))
        scales = {"sx": a.scale_inv, "sw": b.scale_inv}
        whole = {"qresult_x": qresult_x, "qresult_w": qresult_w}
        y = qgemm(a.codes, b.codes, **scales, out_dtype=dtype, gemm_type=gemm_type, **whole)
        wanted = (a.codes.shape[0], b.codes.shape[0])
        if getattr(y, "shape", None) != wanted or y.dtype != dtype:
            found = f"{y.dtype}{y.shape}" if hasattr(y, "dtype") else repr(y)
            raise TypeError(f"{qgemm.__qualname__}: {gemm_type}: expected {dtype.name}{wanted}, got {found}")
        return y

    def axes(x):
        """Which parts of an operand each member of the batch has its own of."""
        has_own = x.scale_inv is not None and x.scale_inv.ndim > 1
        return dataclasses.replace(x, codes=0, scale_inv=0 if has_own else None)

    a, b = (x.matrices(batch, contracting) for x in (a, b))
    function = of_matrices
    for _ in range(batch):
        function = jax.vmap(function, in_axes=(axes(a), axes(b)))
    with _marks.high_precision("the recipe's qgemm multiplies something else than FP8"):
        y = function(a, b)
    y = y.mT if swap else y
    first, second = reversed(rows) if swap else rows
    return _plus(y.reshape(*leading, *first, *second), bias, batch, out_dtype)


def _plus(y, bias, batch, out_dtype):
    """`y + bias`, of the last dimensions, rounded once."""
    if bias is not None:
        rows = (1,) * (y.ndim - bias.ndim)
        bias = bias.astype(jnp.float32).reshape(*bias.shape[:batch], *rows, *bias.shape[batch:])
        y = y.astype(jnp.float32) + bias
    return y.astype(out_dtype)
