"""ragged_matmul: the FP8 GEMMs of several groups in one call. Only the device knows the
sizes of the groups.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _blocks, _ffi
from ._partition import WHOLE
from ._primitive import Op
from ._scaled_matmul import _ScaledMatmul, to_f32
from ._shapes import rescaled
from ._transpose_codes import turned_codes

# The numbers of rows that the jnp program multiplies at once lie between these: about
# the rows of a group.
_FEWEST_ROWS, _MOST_ROWS = 32, 512
# The blocks that Hopper's kernel has, those of DeepSeek-V3: of all operands, and of the
# matrices of groups of rows.
_TILE, _SQUARE = (1, 128), (128, 128)
# The dimension numbers of two matrices whose columns are contracted.
_BY_COLUMNS = (((1,), (1,)), ((), ()))


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
    a_block: tuple[int | None, int | None] | None = None,
    b_block: tuple[int | None, int | None] | None = None,
    b_t: ArrayLike | None = None,
) -> jax.Array:
    """Multiply consecutive groups of rows, each by its own matrix, and scale back.

    Group e has the rows from `begin` to `end`; the first group begins at row 0.
    Equivalent to, in f32 and rounded once at the end:

        # ragged="rows"
        out[begin:end] = a[begin:end] @ b[e].T * (a_scale_inv * b_scale_inv)
        # ragged="contraction"
        out[e] = a[:, begin:end] @ b[:, begin:end].T * (a_scale_inv * b_scale_inv)

    Rows of a beyond the last group give zeros ("rows") or enter no sum ("contraction"),
    whatever their values, NaN included. No group reads the rows of another.
    `group_sizes` are read on the device: no shape depends on them, and the host does
    not wait. A size below 0 counts as 0, and groups end at the last row.

    With `a_block` or `b_block` each element of a or b is multiplied by the scale of its
    block. Blocks are those of the whole of a, and of each matrix of b: a group may
    begin and end inside of a block, and reads only its own elements.

    On NVIDIA GPUs one kernel multiplies operands with one scale on the FP8 tensor
    cores. On compute capability 9.0 it also takes float32 scales of `(1, 128)` for a
    and `(128, 128)` for b, or `(1, 128)` for both of a "contraction", as DeepSeek-V3
    has them. There the products of each block of 128 along the contraction are one sum
    of the tensor cores, and with f32 scales:

        total = fma(a_scale * b_scale, sum_of_block, total)

    where the product of the scales is rounded to f32, and so overflows from 2**128 on.
    For other operands, and on other platforms, a loop over groups multiplies a few
    hundred rows at a time, so that neither work nor memory grow with the number of
    groups. A mesh may cut m and g: a device multiplies its rows by its matrices.

    Args:
        a: float8_e4m3fn or float8_e5m2; `[m, k]`, or `[p, m]` for "contraction".
        b: float8_e4m3fn or float8_e5m2; `[g, n, k]`, or `[n, m]` for "contraction".
        a_scale_inv: f32[] or f32[1]; with `a_block=(r, c)` float32 or float8_e8m0fnu
            `[ceil(m / r), ceil(k / c)]`, with p and m in place of m and k for
            "contraction".
        b_scale_inv: f32[] or f32[1], one for all groups; with `b_block=(r, c)` float32
            or float8_e8m0fnu `[g, ceil(n / r), ceil(k / c)]`, or
            `[ceil(n / r), ceil(m / c)]`.
        group_sizes: int32 `[g]`, of sum at most m.
        ragged: the dimension m that the groups cut: the `"rows"` of a, or the
            `"contraction"`.
        out_dtype: bfloat16, float16 or float32.
        precise: adds every 128 products to an f32 sum, on Ada every 32, as products
            with blocks always do. It matters on Ada and Hopper, whose tensor cores keep
            13 bits; Blackwell's keep those of f32.
        a_block, b_block: `(rows, columns)` of a block, where None in the pair stands
            for all rows or columns. The default None means one scale for the operand.
        b_t: b as `[g, k, n]`, or `[m, n]` for "contraction", if another product reads b
            in that layout; as `b_t` of `scaled_matmul`.

    Returns:
        `[m, n]` of `out_dtype`, or `[g, p, n]` for "contraction".

    Raises:
        TypeError: a scale has another dtype, or the op is differentiated.
        ValueError: scales have another shape, or a block is not a pair of positive ints
            or Nones. `ragged_dot` has checked all else.
    """
    op = "ragged_matmul"
    leading = () if ragged == "contraction" else (group_sizes.size,)
    a_scale_inv, a_block = _blocks.checked_scale(
        op, "a_", a_scale_inv, a_block, (), a.shape[:1], a.shape[1:]
    )
    b_rows, b_cols = b.shape[-2:-1], b.shape[-1:]
    b_scale_inv, b_block = _blocks.checked_scale(
        op, "b_", b_scale_inv, b_block, leading, b_rows, b_cols
    )
    options = np.dtype(out_dtype), precise, a_block, b_block
    second = (1,) * (b_t is not None)
    op = _RaggedMatmul(ragged == "rows", *options, second=second)
    rest = [b_t] * len(second)
    return op(a, b, a_scale_inv, b_scale_inv, group_sizes, *rest)[0]


def _moved(x, shifts, axis=0):
    """Move the matrices `[count, ...]` along an axis, round the end, each by its own
    shift.
    """
    return jax.vmap(lambda x, shift: jnp.roll(x, shift, axis))(x, shifts)


class _RaggedMatmul(Op):
    """The operands are a, b, a_scale_inv, b_scale_inv, group_sizes, and b_t where b has
    a second layout.

    Attributes:
        by_rows: whether the groups cut the rows of a; else they cut the contraction.
        out_dtype, precise, a_block, b_block: as `ragged_matmul` takes them.
    """

    name = "ragged_matmul"
    turned = turned_codes
    # As of one matrix: codes are widened to bfloat16 on CPUs.
    cpu, dtypes = _ScaledMatmul.cpu, _ScaledMatmul.dtypes
    by_rows: bool
    out_dtype: np.dtype
    precise: bool
    a_block: tuple | None
    b_block: tuple | None

    @property
    def has_blocks(self):
        return (self.a_block, self.b_block) != (None, None)

    def shape(self, a, b, group_sizes):
        """Return the shape of the result."""
        leading = a.shape[:-2] if self.by_rows else group_sizes.shape
        return (*leading, a.shape[-2], b.shape[-2])

    def names(self, *ranks):
        m, n, group = ("m0",), ("n0",), ("g0",)
        if self.by_rows:
            rows, k, leading, out = m, ("k0",), group, (m, n)
        else:
            rows, k, leading = ("p0",), m, ()
            out = group, rows, n
        operands = [(rows, k), (leading, n, k)]
        operands.append(_blocks.scale_names((), rows, k, self.a_block))
        operands.append(_blocks.scale_names(leading, n, k, self.b_block))
        # Where a group begins depends on the sizes of all before it.
        operands.append(((f"{WHOLE}_g",),))
        return operands, [out]

    def sizes(self, *shapes):
        return {} if self.by_rows else {"g0": shapes[4][0]}

    def reference(
        self,
        a,
        b,
        a_scale_inv,
        b_scale_inv,
        group_sizes,
        first=None,
        widen=to_f32,
    ):
        """Widen the codes, which is exact, and multiply with f32 accumulation in a
        loop.

        `first`, i32 `[*vmapped]`, is the row at which the first group begins; None is
        row 0.
        """
        shape = self.shape(a, b, group_sizes)
        if 0 in a.shape or 0 in b.shape:
            return (lax.full(shape, 0, self.out_dtype),)
        if first is None:
            first = lax.full(group_sizes.shape[:-1], 0, jnp.int32)
        # 1. Widen the codes. Scales of blocks multiply the codes: they are then no
        #    factor of the product.
        one, precision = lax.full((*shape[: self.vmap_dims], 1), 1, jnp.float32), None
        # these f32 have all their bits: GPUs must not cut them to TF32
        if self.has_blocks:
            widen, precision = to_f32, lax.Precision.HIGHEST
        a, b = widen(a), widen(b)
        if self.a_block is not None:
            a = _blocks.scaled(a, a_scale_inv, self.a_block, *a.shape[-2:])
            a_scale_inv = one
        if self.b_block is not None:
            b = _blocks.scaled(b, b_scale_inv, self.b_block, *b.shape[-2:])
            b_scale_inv = one
        # 2. Multiply.
        multiply = ragged_rows if self.by_rows else ragged_contraction
        operands = a, b, group_sizes, first
        if self.vmap_dims == 0:
            out = multiply(*operands, precision)
        else:
            # Run the loops one after the other: as a batch, each step would touch the
            # product of every vmapped index.
            flat = tuple(x.reshape(-1, *x.shape[self.vmap_dims :]) for x in operands)
            out = lax.map(lambda x: multiply(*x, precision), flat).reshape(shape)
        # 3. Apply the scales of whole operands.
        out = rescaled(out, a_scale_inv, b_scale_inv)
        return (out.astype(self.out_dtype),)

    def cuda(self, a, b, *rest):
        *scales, group_sizes = rest[:3]
        shape = self.shape(a, b, group_sizes)
        count = math.prod(a.shape[: self.vmap_dims])

        def merged(x):
            return x.reshape(count, *x.shape[self.vmap_dims :])

        a, b, group_sizes, *first = map(merged, (a, b, group_sizes, *rest[3:]))
        if self.has_blocks:
            a_scales, b_scales = map(merged, scales)
        else:
            a_scales, b_scales = (x.reshape(-1) for x in scales)
        # The kernel takes the first group at row 0: move rows there, with their scales.
        for begin in first:
            if self.by_rows:
                a = _moved(a, -begin)
                if self.has_blocks:
                    a_scales = _moved(a_scales, -begin)
            elif self.has_blocks:
                # Blocks of rows cannot move: the rows before are one more group.
                group_sizes = jnp.concatenate([begin[:, None], group_sizes], axis=1)
            else:
                a, b = _moved(a, -begin, 1), _moved(b, -begin, 1)
        # The scales of one block of all rows lie side by side, as they were written.
        if self.has_blocks:
            a_scales = a_scales.mT
            if not self.by_rows:
                b_scales = b_scales.mT
        result = self.shape(a, b, group_sizes), self.out_dtype
        operands = a, b, a_scales, b_scales, group_sizes
        (out,) = _ffi.call("ragged_matmul", [result], *operands, precise=self.precise)
        for begin in first:
            if self.by_rows:
                out = _moved(out, begin)
            elif self.has_blocks:
                out = out[:, 1:]
        return (out.reshape(shape),)

    def on_shards(self, operands, cut):
        """Give a device the sizes of its groups in its rows, and the row at which the
        first of them begins.
        """
        (row, row_shards), (group, group_shards) = cut("m0"), cut("g0")
        if row_shards == group_shards == 1:
            return operands
        *matrices, group_sizes = operands
        # 1. Find where each group of the whole matrix begins and ends, as a row of this
        #    device.
        rows = matrices[0].shape[-2 if self.by_rows else -1]
        groups = group_sizes.shape[-1] // group_shards
        ends = ends_of_groups(group_sizes, rows * row_shards)
        bounds = jnp.concatenate([lax.full_like(ends[..., :1], 0), ends], axis=-1)
        bounds = jnp.clip(bounds - row * rows, 0, rows)
        # 2. Take the groups of this device.
        bounds = lax.dynamic_slice_in_dim(bounds, group * groups, groups + 1, axis=-1)
        operands = [*matrices, jnp.diff(bounds)]
        return operands if group_shards == 1 else [*operands, bounds[..., 0]]

    def not_on(self, capabilities, *types):
        """Return why no kernel multiplies these operands on GPUs of these compute
        capabilities; or None.
        """
        if not self.has_blocks:
            return None
        are_f32 = all(scale.dtype == jnp.float32 for scale in types[2:4])
        needed = _TILE, _SQUARE if self.by_rows else _TILE
        blocks = f"{self.a_block} by {self.b_block}"
        if not are_f32 or (self.a_block, self.b_block) != needed:
            return f"ragged_matmul: no kernel has scales for blocks ({blocks})"
        without = capabilities - {(9, 0)}
        if not without:
            return None
        have = ".".join(map(str, min(without)))
        return (
            f"ragged_matmul: the kernel with scales for blocks ({blocks}) needs "
            f"compute capability 9.0, this GPU has {have}"
        )


# The jnp program loops over chunks of groups, so that neither work nor memory grow with
# their number.
def ends_of_groups(group_sizes, m):
    """Return the row after the last one of each group. Sizes below 0 count as 0, and
    groups end at the last row.
    """
    sizes = jnp.clip(group_sizes, 0, m)
    return jnp.minimum(jnp.cumsum(sizes, axis=-1, dtype=jnp.int32), m)


def _over_chunks(body, shape, m, group_sizes, first):
    """Run `out = body(out, group, begin, inside)` for every chunk, from f32 zeros of
    `shape` on.

    Chunks cut groups of these sizes, of `m` rows in all, the first of which begins at
    row `first`. No chunk has rows of two groups. The window of a chunk is the rows from
    `begin` on, as many for all chunks, so that shapes are static. Near the end the
    window moves up so as not to reach beyond the last row; `inside`, a bool for each
    row of the window, says which rows belong to the chunk.
    """
    # A chunk has about as many rows as a group has on average, a power of two.
    average = max(m // group_sizes.shape[0], 1)
    rows = min(_MOST_ROWS, 1 << (average - 1).bit_length())
    rows = min(m, max(_FEWEST_ROWS, rows))
    ends = ends_of_groups(group_sizes, m)
    sizes = jnp.diff(ends, prepend=lax.full((1,), 0, jnp.int32))
    counts = (sizes + (rows - 1)) // rows
    chunks, ends = jnp.cumsum(counts, dtype=jnp.int32), ends + first
    # where chunk 0 would begin if it were of the group
    starts = ends - sizes - (chunks - counts) * rows

    def step(i, out):
        # 1. Find the group of chunk i, and the first row of the chunk.
        group = jnp.sum((chunks <= i).astype(jnp.int32))
        start = starts[group] + i * rows
        # 2. Keep the window inside the matrix, and mask its rows that are not of the
        #    chunk.
        begin = jnp.minimum(start, m - rows)
        row = begin + lax.iota(jnp.int32, rows)
        inside = (row >= start) & (row < jnp.minimum(start + rows, ends[group]))
        return body(out, group, begin, inside)

    return lax.fori_loop(0, chunks[-1], step, lax.full(shape, 0, jnp.float32))


def ragged_rows(a, b, group_sizes, first, precision):
    """Multiply a `[m, k]` by b `[g, n, k]`: f32 `[m, n]`."""

    def body(out, group, begin, inside):
        rows = lax.dynamic_slice_in_dim(a, begin, inside.size, axis=0)
        matrix = lax.dynamic_index_in_dim(b, group, axis=0, keepdims=False)
        new = lax.dot_general(rows, matrix, _BY_COLUMNS, precision, jnp.float32)
        old = lax.dynamic_slice_in_dim(out, begin, inside.size, axis=0)
        new = jnp.where(inside[:, None], new, old)
        return lax.dynamic_update_slice_in_dim(out, new, begin, axis=0)

    m = a.shape[0]
    return _over_chunks(body, (m, b.shape[1]), m, group_sizes, first)


def ragged_contraction(a, b, group_sizes, first, precision):
    """Multiply a `[p, m]` by b `[n, m]`: f32 `[g, p, n]`."""

    def body(out, group, begin, inside):
        def columns(x):
            x = lax.dynamic_slice_in_dim(x, begin, inside.size, axis=1)
            return jnp.where(inside[None, :], x, lax.full(x.shape, 0, x.dtype))

        old = lax.dynamic_index_in_dim(out, group, axis=0, keepdims=False)
        both = columns(a), columns(b)
        new = old + lax.dot_general(*both, _BY_COLUMNS, precision, jnp.float32)
        return lax.dynamic_update_index_in_dim(out, new, group, axis=0)

    (p, m), (n, _) = a.shape, b.shape
    return _over_chunks(body, (group_sizes.size, p, n), m, group_sizes, first)
