"""Ragged products in jnp: loops over chunks of groups, so that neither work nor memory grow with their number."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# The numbers of rows that the jnp program multiplies at once lie between these: about the rows of a group.
_FEWEST_ROWS, _MOST_ROWS = 32, 512


def ends_of_groups(group_sizes, m: int):
    """Return the row after the last one of each group. Sizes below 0 count as 0, and groups end at the last row."""
    return jnp.minimum(jnp.cumsum(jnp.clip(group_sizes, 0, m), axis=-1, dtype=jnp.int32), m)


class Chunks(NamedTuple):
    """Groups of rows, cut into chunks of at most `rows` for the loops. No chunk has rows of two groups.

    Attributes:
        rows: the largest number of rows of a chunk; the same for all chunks, so that the loops' shapes are static.
        m: the number of all rows.
        sizes, ends: i32 `[g]`, the number of rows of each group, and the row after its last row.
        chunks: i32 `[g]`, the number of chunks of all groups up to and including each group.
    """

    rows: int
    m: int
    sizes: jax.Array
    ends: jax.Array
    chunks: jax.Array

    @staticmethod
    def cut(group_sizes, m: int, first) -> "Chunks":
        """Cut groups of these sizes, of `m` rows in all; the first group begins at row `first`."""
        groups = group_sizes.shape[0]
        # A chunk has about as many rows as a group has on average, a power of two.
        average = max(m // groups, 1)
        rows = min(m, max(_FEWEST_ROWS, min(_MOST_ROWS, 1 << (average - 1).bit_length())))
        ends = ends_of_groups(group_sizes, m)
        sizes = jnp.diff(ends, prepend=lax.full((1,), 0, jnp.int32))
        ends = ends + first
        chunks = jnp.cumsum((sizes + (rows - 1)) // rows, dtype=jnp.int32)
        return Chunks(rows, m, sizes, ends, chunks)

    def loop(self, body, out):
        """Run `out = body(out, group, begin, inside)` for every chunk.

        The window of a chunk is the `rows` rows from `begin` on. Near the end the window moves up so as not to reach
        beyond the last row; `inside`, bool `[rows]`, says which rows of the window belong to the chunk.
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


def _dot(a, b, precision):
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def ragged_rows(a, b, group_sizes, first, precision):
    """Multiply a `[m, k]` by b `[g, n, k]`: f32 `[m, n]`."""
    chunks = Chunks.cut(group_sizes, a.shape[0], first)

    def body(out, group, begin, inside):
        rows = lax.dynamic_slice_in_dim(a, begin, chunks.rows, axis=0)
        new = _dot(rows, lax.dynamic_index_in_dim(b, group, axis=0, keepdims=False), precision)
        old = lax.dynamic_slice_in_dim(out, begin, chunks.rows, axis=0)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], new, old), begin, axis=0)

    return chunks.loop(body, lax.full((a.shape[0], b.shape[1]), 0, jnp.float32))


def ragged_contraction(a, b, group_sizes, first, precision):
    """Multiply a `[p, m]` by b `[n, m]`: f32 `[g, p, n]`."""
    chunks = Chunks.cut(group_sizes, a.shape[1], first)

    def body(out, group, begin, inside):
        def columns(x):
            x = lax.dynamic_slice_in_dim(x, begin, chunks.rows, axis=1)
            return jnp.where(inside[None, :], x, lax.full(x.shape, 0, x.dtype))

        old = lax.dynamic_index_in_dim(out, group, axis=0, keepdims=False)
        return lax.dynamic_update_index_in_dim(out, old + _dot(columns(a), columns(b), precision), group, axis=0)

    shape = (group_sizes.shape[0], a.shape[0], b.shape[0])
    return chunks.loop(body, lax.full(shape, 0, jnp.float32))
