"""ragged_matmul: the FP8 GEMMs of several groups in one call. The sizes of the groups are known on the device alone."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _ffi, _shapes
from ._dequantize import widening_on_cpu
from ._partition import WHOLE
from ._primitive import ONE, tensor_op
from ._product import rescaled

RAGGED = ("rows", "contraction")
# How many rows the jnp program multiplies at once: about as many as a group has, within these.
_FEWEST_ROWS, _MOST_ROWS = 32, 512


def ragged_matmul(
    a: ArrayLike,
    b: ArrayLike,
    a_scale_inv: ArrayLike,
    b_scale_inv: ArrayLike,
    group_sizes: ArrayLike,
    *,
    ragged: str = "rows",
    out_dtype: DTypeLike = jnp.bfloat16,
    precise: bool = False,
) -> jax.Array:
    """Multiply consecutive groups of rows, each by its own matrix, and scale back.

    With `begin, end` the rows of group e, the first of which starts at row 0, and in f32 rounded once at the end:

        out[begin:end] = a[begin:end] @ b[e].T * (a_scale_inv * b_scale_inv)             # ragged="rows"
        out[e] = a[:, begin:end] @ b[:, begin:end].T * (a_scale_inv * b_scale_inv)       # ragged="contraction"

    Rows beyond the last group are zeros, or enter nothing, whatever they hold. So do the values of other groups, NaN
    included. `group_sizes` are read on the device: no shape depends on them and nothing waits for them. A size below 0
    counts as 0, and groups end at the last row.

    On NVIDIA GPUs it is one kernel on the FP8 tensor cores; elsewhere a loop over groups that multiplies a few hundred
    rows at a time, so that neither work nor memory grow with the number of groups.

    Args:
        a: float8_e4m3fn or float8_e5m2; `[m, k]`, or `[p, m]` for "contraction".
        b: float8_e4m3fn or float8_e5m2; `[g, n, k]`, or `[n, m]` for "contraction".
        a_scale_inv: f32[] or f32[1].
        b_scale_inv: f32[] or f32[1], one for all groups.
        group_sizes: int32 `[g]`, of sum at most m.
        ragged: what the groups cut: `"rows"` or `"contraction"`.
        out_dtype: bfloat16, float16 or float32.
        precise: adds every 32 products to an f32 sum. It matters on Ada, whose tensor cores keep 13 bits; Hopper's,
            which multiply these codes as f16, and Blackwell's keep those of f32.

    Returns:
        `[m, n]` of `out_dtype`, or `[g, p, n]` for "contraction".

    Raises:
        TypeError: an argument has another dtype; or the op is differentiated.
        ValueError: an argument has another shape.
    """
    op = "ragged_matmul"
    if ragged not in RAGGED:
        raise ValueError(f'{op}: ragged: expected "rows" or "contraction", got {ragged!r}')
    a, b = _checks.fp8(op, "a", a), _checks.fp8(op, "b", b)
    group_sizes = sizes_of_groups(op, group_sizes)
    if a.ndim != 2:
        raise ValueError(f"{op}: a: expected rank 2, got {a.shape}")
    if ragged == "rows":
        expected = f"[{group_sizes.size}, n, {a.shape[1]}]"
        fits = b.ndim == 3 and b.shape[::2] == (group_sizes.size, a.shape[1])
    else:
        expected, fits = f"[n, {a.shape[1]}]", b.ndim == 2 and b.shape[1] == a.shape[1]
    if not fits:
        groups = group_sizes.size
        raise ValueError(f"{op}: b: expected {expected} to go with a{list(a.shape)} and {groups} groups, got {b.shape}")
    scales = _checks.scale(op, "a_scale_inv", a_scale_inv), _checks.scale(op, "b_scale_inv", b_scale_inv)
    out_dtype = _checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION)
    precise = _checks.flag(op, "precise", precise)
    return _ragged_matmul(a, b, *scales, group_sizes, ragged=ragged, out_dtype=out_dtype, precise=precise)[0]


def sizes_of_groups(op: str, group_sizes):
    """Return the argument `group_sizes` of `op`: int32 `[g]`."""
    group_sizes = _checks.array(op, "group_sizes", group_sizes)
    if group_sizes.dtype != jnp.int32:
        raise TypeError(f"{op}: group_sizes: expected int32, got {group_sizes.dtype}; cast it with .astype(jnp.int32)")
    if group_sizes.ndim != 1:
        raise ValueError(f"{op}: group_sizes: expected one dimension, [g], got {group_sizes.shape}")
    return group_sizes


class _Chunks(NamedTuple):
    """Groups of rows, cut into chunks of at most `rows` for the loops. No chunk has rows of two groups.

    Attributes:
        rows: how many a chunk has at most; the same for all, so that the loops' shapes are static.
        m: how many rows there are.
        sizes, ends: i32 `[g]`, rows of each group, and the row after its last.
        chunks: i32 `[g]`, how many chunks the groups up to and with this one have.
    """

    rows: int
    m: int
    sizes: jax.Array
    ends: jax.Array
    chunks: jax.Array

    @staticmethod
    def cut(group_sizes, m: int) -> "_Chunks":
        """Cut groups of these sizes, of `m` rows in all."""
        groups = group_sizes.shape[0]
        # A chunk has about as many rows as a group has on average, a power of two.
        average = max(m // groups, 1)
        rows = min(m, max(_FEWEST_ROWS, min(_MOST_ROWS, 1 << (average - 1).bit_length())))
        # Sizes below 0 count as 0, and groups end at the last row.
        ends = jnp.minimum(jnp.cumsum(jnp.clip(group_sizes, 0, m), dtype=jnp.int32), m)
        sizes = jnp.diff(ends, prepend=lax.full((1,), 0, jnp.int32))
        chunks = jnp.cumsum((sizes + (rows - 1)) // rows, dtype=jnp.int32)
        return _Chunks(rows, m, sizes, ends, chunks)

    def loop(self, body, out):
        """Run `out = body(out, group, begin, inside)` for every chunk.

        `inside` is bool `[rows]`, which rows from `begin` on are of the chunk: near the end the window moves up instead
        of reaching beyond the last row.
        """

        def step(i, out):
            # 1. Find the group of chunk i, and the first row of the chunk.
            group = jnp.sum((self.chunks <= i).astype(jnp.int32))
            end = self.ends[group]
            first = end - self.sizes[group] + (i - (self.chunks[group] - self._count(group))) * self.rows
            # 2. Keep the window inside the matrix, and mask its rows that are not of the chunk.
            begin = jnp.minimum(first, self.m - self.rows)
            row = begin + lax.iota(jnp.int32, self.rows)
            return body(out, group, begin, (row >= first) & (row < jnp.minimum(first + self.rows, end)))

        return lax.fori_loop(0, self.chunks[-1], step, out)

    def _count(self, group):
        return (self.sizes[group] + (self.rows - 1)) // self.rows


def _dot(a, b):
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _ragged_rows(a, b, group_sizes):
    """Multiply a `[m, k]` by b `[g, n, k]`: f32 `[m, n]`."""
    chunks = _Chunks.cut(group_sizes, a.shape[0])

    def body(out, group, begin, inside):
        rows = lax.dynamic_slice_in_dim(a, begin, chunks.rows, axis=0)
        new = _dot(rows, lax.dynamic_index_in_dim(b, group, axis=0, keepdims=False))
        old = lax.dynamic_slice_in_dim(out, begin, chunks.rows, axis=0)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], new, old), begin, axis=0)

    return chunks.loop(body, lax.full((a.shape[0], b.shape[1]), 0, jnp.float32))


def _ragged_contraction(a, b, group_sizes):
    """Multiply a `[p, m]` by b `[n, m]`: f32 `[g, p, n]`."""
    chunks = _Chunks.cut(group_sizes, a.shape[1])

    def body(out, group, begin, inside):
        def columns(x):
            x = lax.dynamic_slice_in_dim(x, begin, chunks.rows, axis=1)
            return jnp.where(inside[None, :], x, lax.full(x.shape, 0, x.dtype))

        old = lax.dynamic_index_in_dim(out, group, axis=0, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, old + _dot(columns(a), columns(b)), group, axis=0)

    shape = (group_sizes.shape[0], a.shape[0], b.shape[0])
    return chunks.loop(body, lax.full(shape, 0, jnp.float32))


def _reference(a, b, a_scale_inv, b_scale_inv, group_sizes, vmap_dims, ragged, out_dtype, precise, widen=None):
    """Widen the codes, which is exact, and multiply with f32 accumulation in a loop."""
    shape = _out_shape(a, b, group_sizes, vmap_dims, ragged)
    if 0 in a.shape or 0 in b.shape:
        return (lax.full(shape, 0, out_dtype),)
    a, b = (x.astype(jnp.float32) if widen is None else widen(x) for x in (a, b))
    product = _ragged_rows if ragged == "rows" else _ragged_contraction
    if vmap_dims == 0:
        out = product(a, b, group_sizes)
    else:  # one after the other: as one batch, each step of the loop would touch the product of every vmapped index
        flat = (x.reshape(-1, *x.shape[vmap_dims:]) for x in (a, b, group_sizes))
        out = lax.map(lambda operands: product(*operands), tuple(flat)).reshape(shape)
    out = rescaled(out, a_scale_inv, b_scale_inv, lambda scale: _shapes.spread(scale, shape))
    return (out.astype(out_dtype),)


def _on_cpu(*operands, **static):
    """Widen to bfloat16, as scaled_matmul does on CPUs."""
    return _reference(*operands, **static, widen=widening_on_cpu())


def _custom_call(a, b, a_scale_inv, b_scale_inv, group_sizes, vmap_dims, ragged, out_dtype, precise):
    shape = _out_shape(a, b, group_sizes, vmap_dims, ragged)
    count = math.prod(a.shape[:vmap_dims])
    a, b, group_sizes = (x.reshape(count, *x.shape[vmap_dims:]) for x in (a, b, group_sizes))
    scales = (_shapes.group_scales(scale, vmap_dims) for scale in (a_scale_inv, b_scale_inv))
    result = (count, *shape[vmap_dims:]), out_dtype
    (out,) = _ffi.call("ragged_matmul", [result], a, b, *scales, group_sizes, precise=precise)
    return (out.reshape(shape),)


def _out_shape(a, b, group_sizes, vmap_dims, ragged):
    leading, n = a.shape[:vmap_dims], b.shape[-2]
    return (*leading, a.shape[-2], n) if ragged == "rows" else (*leading, group_sizes.shape[-1], a.shape[-2], n)


def _names(*ranks, ragged, **static):
    m, g = f"{WHOLE}_m", f"{WHOLE}_g"  # where a group begins depends on the sizes of all before it
    if ragged == "rows":
        return [(m, "k"), (g, "n", "k"), ONE, ONE, (g,)], [(m, "n")]
    return [("p", m), ("n", m), ONE, ONE, (g,)], [(g, "p", "n")]


_RULES = {"names": _names, "dtypes": lambda *_, out_dtype, **__: [out_dtype]}
_ragged_matmul = tensor_op("ragged_matmul", _reference, _on_cpu, cuda=_custom_call, **_RULES)
