"""Convert QTensors to and from qwix's QArray and the operands of
`jax.nn.scaled_matmul`; codes are not copied.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..numerics import E4M3, FP8_DTYPES
from ..recipes import QTensor

_E8M0 = jnp.dtype(jnp.float8_e8m0fnu)


def to_qarray(q: QTensor) -> Any:
    """Return the codes and scales of a QTensor as a `qwix.QArray`.

    The codes are the same array. The scales are reshaped to the rank of the codes.
    Scales in E8M0, which qwix does not have, become float32, exactly. `data_t` and
    `source` are left out.

    Args:
        q: a QTensor with FP8 codes, whose blocks divide the dimensions of the codes.

    Raises:
        ImportError: qwix is not installed.
        ValueError: `q` is in high precision; or a block is cut off at an edge, or lies
            across dimensions of the codes: qwix has tiles that divide every dimension.

    References:
        qwix 0.1.8, `QArray` and `validate_qarray`.
    """
    from qwix import QArray  # not a dependency

    scale_inv, block = _scales_and_block("to_qarray", q)
    if block is None:
        shape = (1,) * q.ndim
    else:
        batch = scale_inv.ndim - 2
        first = q.ndim - q.cols
        rows = _spread(q, q.shape[batch:first], block[0])
        cols = _spread(q, q.shape[first:], block[1])
        shape = (*q.shape[:batch], *rows, *cols)
    qtype = q.data.dtype
    # qwix says "mxfp8" for E4M3 in blocks of 32 whose scales are powers of two.
    if scale_inv.dtype == _E8M0 and block == (1, 32) and qtype == E4M3.dtype:
        qtype = "mxfp8"
    return QArray(q.data, scale_inv.astype(jnp.float32).reshape(shape), qtype=qtype)


def from_qarray(array: Any, *, batch: int = 0) -> QTensor:
    """Return the codes and scales of a `qwix.QArray` as a QTensor, whose columns are
    the last dimension.

    The codes are the same array. The scales become float32, f32[1] for one scale, else
    `[*batch, rows / r, cols / c]`.

    Args:
        array: a `qwix.QArray`, or an object with its attributes `qvalue`, `scale` and
            `zero_point`, with FP8 codes and no zero point.
        batch: the number of leading dimensions that count matrices with scales of their
            own.

    Raises:
        ValueError: the codes are not FP8; there is a zero point; or no block `(r, c)`
            describes the tiles.
    """
    codes = array.qvalue
    scale = array.scale
    if codes.dtype not in FP8_DTYPES or array.zero_point is not None:
        raise ValueError(
            "from_qarray: array: expected codes in FP8 without a zero point, got "
            f"{codes.dtype} and zero_point {array.zero_point}; jaxfp8 multiplies no "
            "other codes"
        )
    if scale.size == 1:
        return QTensor(codes, scale.astype(jnp.float32).reshape(1))
    pairs = list(zip(codes.shape, scale.shape, strict=True))
    r = _merged(pairs[batch:-1])
    c = _merged(pairs[-1:])
    if r is None or any(size != count for size, count in pairs[:batch]):
        raise ValueError(
            "from_qarray: array: expected a scale for each block of rows and columns, "
            f"after {batch} batch dimensions, got codes {codes.shape} and scales "
            f"{scale.shape}"
        )
    counts = (math.prod(count for _, count in pairs[batch:-1]), scale.shape[-1])
    # A block of one whole row is (1, None).
    block = (r, None if r == 1 and c == codes.shape[-1] else c)
    is_power = getattr(array, "qtype", None) == "mxfp8"
    scale_inv = scale.astype(jnp.float32).reshape(*codes.shape[:batch], *counts)
    return QTensor(codes, scale_inv, block=block, power_2_scale=is_power)


def to_scaled_matmul(q: QTensor) -> tuple[jax.Array, jax.Array]:
    """Return `(codes [B, M, K], scales [B, M, blocks])`, an operand of
    `jax.nn.scaled_matmul`.

        a, a_scales = to_scaled_matmul(x)
        b, b_scales = to_scaled_matmul(kernel)
        y = jax.nn.scaled_matmul(a, b, a_scales, b_scales)

    Codes and scales are only reshaped, and keep their dtypes. B counts the batch
    dimensions, M the rows and K the columns. On NVIDIA GPUs cuDNN multiplies E8M0
    blocks of 32; JAX has no such product on CPUs.

    Args:
        q: a QTensor with blocks `(1, c)`, which lie along its columns alone: from
            `MXFP8BlockScaling` or `Float8RowwiseScaling`, or x of `Float8BlockScaling`.

    Raises:
        ValueError: `q` is in high precision; `q` has one scale, or scales for several
            rows, which `scaled_matmul` would need repeated for each row; or the last
            block is cut off.
    """
    scale_inv, block = _scales_and_block("to_scaled_matmul", q)
    first = q.ndim - q.cols
    m = math.prod(q.shape[max(scale_inv.ndim - 2, 0) : first])
    k = math.prod(q.shape[first:])
    if block is None or block[0] != 1 or k % (block[1] or k):
        raise ValueError(
            f"to_scaled_matmul: q: expected blocks (1, c) that divide the {k} "
            f"columns, got block={block}; jaxfp8.dot_general multiplies other blocks"
        )
    return q.data.reshape(-1, m, k), scale_inv.reshape(-1, m, scale_inv.shape[-1])


def from_scaled_matmul(codes: jax.Array, scales: jax.Array) -> QTensor:
    """Return an operand of `jax.nn.scaled_matmul` as a QTensor, which holds the same
    two arrays.

    Args:
        codes: FP8 `[B, M, K]`.
        scales: float32 or float8_e8m0fnu `[B, M, blocks]`, for equal blocks along K.

    Raises:
        ValueError: `codes` or `scales` have another dtype or shape.
    """
    fits = codes.ndim == scales.ndim == 3 and codes.shape[:2] == scales.shape[:2]
    if not fits or codes.shape[2] % scales.shape[2]:
        raise ValueError(
            "from_scaled_matmul: expected codes [B, M, K] and scales [B, M, blocks], "
            f"whose number divides K, got {codes.shape} and {scales.shape}"
        )
    if codes.dtype not in FP8_DTYPES or scales.dtype not in (jnp.float32, _E8M0):
        raise ValueError(
            "from_scaled_matmul: expected codes in FP8 and scales in float32 or "
            f"float8_e8m0fnu, got {codes.dtype} and {scales.dtype}"
        )
    block = (1, codes.shape[2] // scales.shape[2])
    return QTensor(codes, scales, block=block, power_2_scale=scales.dtype == _E8M0)


def _scales_and_block(where: str, q: QTensor) -> tuple[jax.Array, tuple | None]:
    """Return the scales of FP8 codes and their block; the block of one scale is
    None.
    """
    if not q.is_fp8:
        raise ValueError(
            f"{where}: q: expected FP8 codes with scales, got {q.data.dtype} without; "
            "quantize it first"
        )
    if q.has_one_scale:
        return q.scale_inv, None
    if q.block is not None:
        return q.scale_inv, q.block
    *batch, rows, cols = q.scale_inv.shape
    first = q.ndim - q.cols
    m = math.prod(q.shape[len(batch) : first])
    return q.scale_inv, (m // rows, math.prod(q.shape[first:]) // cols)


def _spread(q: QTensor, sizes: Sequence[int], step: int | None) -> tuple[int, ...]:
    """Return for each of several merged dimensions how many blocks of `step` elements
    lie along the dimension.
    """
    counts = []
    step = math.prod(sizes) if step is None else min(step, math.prod(sizes))
    for size in reversed(sizes):
        if max(size, step) % min(size, step):
            raise ValueError(
                f"to_qarray: q: expected blocks {q.block} that divide the dimensions "
                f"of codes {q.shape}, got a block that is cut off, or lies across "
                "dimensions; qwix has no such tiles"
            )
        counts.insert(0, max(size // step, 1))
        step = max(step // size, 1)
    return tuple(counts)


def _merged(pairs: Sequence[tuple[int, int]]) -> int | None:
    """Return how many elements of merged dimensions share a scale; None where that is
    not one number.

    Args:
        pairs: for each dimension its size and its number of scales.
    """
    step, is_open = 1, True
    for size, count in reversed(pairs):
        if not is_open and size != count:
            return None
        step, is_open = step * (size // count), is_open and count == 1
    return step
