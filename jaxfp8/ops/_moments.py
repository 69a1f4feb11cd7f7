"""Ops on the moments of an optimizer in FP8, with an amax and an exponent for each
block; and a whole step of Adam.

A moment is `(data, amax, exponent)`: float8_e4m3fn codes in its shape; and for each
block of 128 elements along an axis the largest finite magnitude a, f32, and the binary
logarithm of k, int8. The codes are of `sign(x) 448 u**k`, where `u = |x| / a`. This
range expansion (COAT, arXiv:2410.19313) spends the format's range on the numbers of the
block: a block of half the span in octaves can have twice the k, which halves its
errors. Each block has the largest k of 2, 1 and 1/2 that its smallest element allows.
These powers are products and square roots, which all platforms round alike.

An element that is not finite has the code of NaN and does not count in the amax, so
that it spoils no other element. A subnormal element counts as zero, because XLA's CPU
threads compute with subnormals as if they were zero.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import _compat
from ..numerics._moments import (
    BLOCK,
    adam_step,
    changes_and_span,
    decoded,
    each,
    each_amax,
    encoded,
    join,
    split,
)
from . import _blocks, _ffi
from ._partition import WHOLE
from ._primitive import Op, OpOfUnits, dims

# The largest number of leaves in one call of `adam_update`, and how many numbers a step
# of a leaf has.
MAX_LEAVES = 16
ADAM_NUMBERS = 11


def decode_moment(
    data: jax.Array, amax: jax.Array, exponent: jax.Array, *, axis: int
) -> jax.Array:
    """Compute the f32 elements of a moment: `sign(data) amax (|data| / 448)**(1 / k)`.

    Args:
        data: float8_e4m3fn `[..., n, ...]`.
        amax, exponent: f32 and int8 `[..., ceil(n / 128), ...]`.
        axis: the axis that blocks cut.

    Returns:
        f32, in the shape of `data`.
    """
    return _decode(data, amax, exponent, spec=_Spec(axis - data.ndim))[0]


def encode_moment(
    data: jax.Array,
    amax: jax.Array,
    exponent: jax.Array,
    after: jax.Array,
    keys: jax.Array | None,
    *,
    squared: bool,
    axis: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantize `after` where a block differs from what the moment decodes to; keep the
    bits of other blocks.

    Args:
        data, amax, exponent, axis: the moment, as in `decode_moment`.
        after: f32 in the shape of `data`.
        keys: random u32 in the shape of `amax`: rounds stochastically by the high bits
            of `keys + i mix(keys) + i**2 mix(mix(keys))`, where i is the number of an
            element in its block. None rounds to nearest.
        squared: whether the elements are squares. Stochastic rounding keeps the mean of
            their fourth roots, of other elements that of the elements. Squares round to
            zero only where they are zero, and k depends on other spans.

    Returns:
        `(data, amax, exponent)`, of the shapes and dtypes of the arguments.
    """
    keys = () if keys is None else (keys,)
    return tuple(
        _encode(
            data, amax, exponent, after, *keys, spec=_Spec(axis - data.ndim, squared)
        )
    )


class AdamLeaf(NamedTuple):
    """A leaf of the parameters, as `adam_update` takes it.

    Attributes:
        grads: f32, of any shape.
        params: f32 in that shape; None where the update is the result, and not the next
            parameters.
        mu, nu: the moments, each `(data, amax, exponent)`.
        keys: u32 `[2, ...]`, for mu and for nu in the shape of its amaxes, for the
            random bits of rounding, as in `encode_moment`.
        numbers: f32 `[11]`: b1, 1 - b1, b2, 1 - b2, the inverses of 1 - b1**t and 1 -
            b2**t, eps_root, eps, the learning rate, the weight decay, and a factor on
            the gradient, by which it is clipped.
    """

    grads: jax.Array
    params: jax.Array | None
    mu: tuple[jax.Array, jax.Array, jax.Array]
    nu: tuple[jax.Array, jax.Array, jax.Array]
    keys: jax.Array
    numbers: jax.Array


def adam_update(
    leaves: list[AdamLeaf], axes: list[int]
) -> list[tuple[jax.Array, tuple, tuple]]:
    """Take a step of Adam: decode the moments of leaves, average, compute the updates
    and encode the moments, at once.

        g = factor grads
        m = (1 - b1) g + b1 m
        v = (1 - b2) g**2 + b2 v
        u = m c1 / (sqrt(v c2 + eps_root) + eps)
        p = p - rate (u + decay p)

    in f32, each operation rounded to nearest once, with 0 in place of products below
    2**-102 (of squares 2**-125), so that no platform meets subnormal numbers. Moments
    are encoded as `encode_moment` does, but for two things: blocks that do not change
    are encoded too, and NaN and infinite elements have codes without their signs.
    Squares that overflow stay infinite.

    Args:
        leaves: all with params or all without.
        axes: for each leaf the axis that blocks cut.

    Returns:
        For each leaf `(p, mu, nu)`, without params `(u, mu, nu)`. In place, where XLA
        finds that it can: p in params, u in grads.
    """
    results = []
    for start in range(0, len(leaves), MAX_LEAVES):
        call = leaves[start : start + MAX_LEAVES]
        spec = _AdamSpec(
            tuple(
                axis - leaf.grads.ndim
                for leaf, axis in zip(call, axes[start:], strict=False)
            ),
            call[0].params is not None,
        )
        # Gradients come last: where XLA would cut them along another axis, results are
        # cut as what they replace.
        operands = [
            x for grads, *rest in map(jax.tree.leaves, call) for x in (*rest, grads)
        ]
        flat = _adam(*operands, spec=spec)
        results += [
            (out, tuple(both[:3]), tuple(both[3:]))
            for out, *both in _batched(flat, _ADAM_RESULTS)
        ]
    return results


# --------------------------------------------------------------------- the custom calls


def _to_rows(x, axis):
    """Return a matrix whose rows the blocks cut."""
    x = jnp.moveaxis(x, axis, -1)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _from_rows(rows, axis, shape):
    """Undo `_to_rows` of an array of `shape`."""
    sizes = [size for i, size in enumerate(shape) if i != len(shape) + axis]
    return jnp.moveaxis(rows.reshape(*sizes, shape[axis]), -1, axis)


# ----------------------------------------------------------------------- the primitives


def _names(rank, axis, leaf=""):
    """Return the names of the dimensions of elements, and those of blocks."""
    names = dims(f"{leaf}x", rank)
    before, after = names[: rank + axis], names[rank + axis + 1 :]
    return (*before, f"{leaf}col0", *after), (*before, f"{leaf}blocks", *after)


def _aligned(axes, sizes, mesh_shape, leaf=""):
    """Cut amaxes and exponents where the codes are cut, and these between blocks."""
    blocks, column = f"{leaf}blocks", f"{leaf}col0"
    # More operands count blocks than elements: a mesh axis that cuts both has been
    # given to the blocks.
    if blocks in axes and column not in axes:
        axes = axes | {column: axes[blocks]}
    return _blocks.aligned(axes, sizes, mesh_shape, {f"{leaf}col": {blocks: BLOCK}})


class _Spec(NamedTuple):
    """The static part: the axis that blocks cut, counted from the end, and whether the
    elements are squares.
    """

    axis: int
    squared: bool = False


class _Moment(Op):
    """An op of moments."""

    def align(self, axes, sizes, mesh_shape, spec):
        """Cut amaxes and exponents where the codes are cut, and these between
        blocks.
        """
        return _aligned(axes, sizes, mesh_shape)


class _DecodeMoment(_Moment):
    name = "decode_moment"

    def names(self, *ranks, spec):
        elements, blocks = _names(ranks[0], spec.axis)
        return [elements, blocks, blocks], [elements]

    def reference(self, data, amax, exponent, vmap_dims, spec):
        axis = spec.axis
        codes = split(lax.bitcast_convert_type(data, jnp.uint8), axis)
        values = decoded(codes, each_amax(amax, axis), each(exponent, axis))
        return (join(values, axis, data.shape),)

    def cpu(self, data, amax, exponent, vmap_dims, spec):
        rows = [_to_rows(x, spec.axis) for x in (data, amax, exponent)]
        (out,) = _ffi.call("decode_moment", [(rows[0].shape, jnp.float32)], *rows)
        return (_from_rows(out, spec.axis, data.shape),)

    # XLA fuses it into the update, so that decoded moments are not read from memory
    cuda = reference


class _EncodeMoment(_Moment):
    name = "encode_moment"

    def names(self, *ranks, spec):
        elements, blocks = _names(ranks[0], spec.axis)
        return [elements, blocks, blocks, elements, blocks][: len(ranks)], [
            elements,
            blocks,
            blocks,
        ]

    def dtypes(self, data, amax, exponent, *operands, spec):
        return [data.dtype, amax.dtype, exponent.dtype]

    def reference(self, data, amax, exponent, after, *keys, vmap_dims, spec):
        axis, squared = spec
        # 1. Read the moment for the numbers of its blocks. The barriers keep XLA from
        #    storing what its decoding, this
        # step and the next have in common, which would be more bytes than the moment.
        codes, after = lax.optimization_barrier(
            (lax.bitcast_convert_type(data, jnp.uint8), after)
        )
        keep, top, bottom = changes_and_span(
            split(codes, axis), amax, exponent, split(after, axis), axis
        )
        old, after, keep, top, bottom = lax.optimization_barrier(
            (codes, after, keep, top, bottom)
        )

        # 2. Encode all blocks, and keep the bits of those that are the same. Select
        #    bytes: XLA's CPU compiler may move
        # FP8 through float16.
        codes, power = encoded(
            split(after, axis), top, bottom, keys[0] if keys else None, squared, axis
        )
        codes = jnp.where(each(keep, axis), split(old, axis), codes.astype(jnp.uint8))
        data = lax.bitcast_convert_type(join(codes, axis, data.shape), data.dtype)
        return data, jnp.where(keep, amax, top), jnp.where(keep, exponent, power)

    def cpu(self, *operands, vmap_dims, spec):
        rows = [_to_rows(x, spec.axis) for x in operands]
        rows += [lax.full((0,), 0, jnp.uint32)] * (5 - len(rows))  # no keys
        results = [(x.shape, x.dtype) for x in rows[:3]]
        new = _ffi.call(
            "encode_moment",
            results,
            *rows,
            aliases={0: 0, 1: 1, 2: 2},
            squared=spec.squared,
        )
        return [
            _from_rows(x, spec.axis, old.shape)
            for x, old in zip(new, operands[:3], strict=True)
        ]


_ADAM_RESULTS = 7  # of a leaf


def _batched(items, count):
    return [items[i : i + count] for i in range(0, len(items), count)]


class _AdamSpec(NamedTuple):
    """The static part: the axes that blocks cut, counted from the end, and whether
    parameters are given and stepped.
    """

    axes: tuple[int, ...]
    applies: bool

    @property
    def operands(self) -> int:
        """The number of operands of a leaf."""
        return 9 + self.applies

    def units(self, operand_count):
        each, results = self.operands, _ADAM_RESULTS
        return [
            (
                list(range(each * i, each * (i + 1))),
                list(range(results * i, results * (i + 1))),
            )
            for i in range(len(self.axes))
        ]

    def chosen(self, indices):
        return _AdamSpec(tuple(self.axes[i] for i in indices), self.applies)


class _AdamUpdate(OpOfUnits):
    name = "adam_update"

    def names(self, *ranks, spec):
        operands, results = [], []
        for i, axis in enumerate(spec.axes):
            elements, blocks = _names(ranks[spec.operands * i], axis, f"leaf{i}_")
            moment = [elements, blocks, blocks]
            operands += [elements] * spec.applies + 2 * moment
            operands += [
                (f"{WHOLE}_moment{i}", *blocks),
                (f"{WHOLE}_numbers{i}",),
                elements,
            ]
            results += [elements, *moment, *moment]
        return operands, results

    def dtypes(self, *operands, spec):
        f32, moment = (
            np.dtype(np.float32),
            [x.dtype for x in operands[spec.applies :][:3]],
        )
        return [f32, *moment, *moment] * len(spec.axes)

    def align(self, axes, sizes, mesh_shape, spec):
        return _aligned(axes, sizes, mesh_shape, "leaf0_")

    def lower(
        self,
        ctx,
        operands,
        platform,
        native,
        is_loaded,
        implementation,
        vmap_dims,
        spec,
    ):
        """Lower each leaf by itself on a mesh, which may cut each along other axes."""
        if _compat.devices_of(ctx) != "mesh" or len(spec.axes) == 1:
            return super().lower(
                ctx,
                operands,
                platform,
                native,
                is_loaded,
                implementation,
                vmap_dims,
                spec,
            )
        results = []
        for i, (ins, outs) in enumerate(spec.units(len(operands))):
            types = [
                [avals[j] for j in part]
                for avals, part in ((ctx.avals_in, ins), (ctx.avals_out, outs))
            ]
            results += super().lower(
                ctx.replace(avals_in=types[0], avals_out=types[1]),
                *(
                    [operands[j] for j in ins],
                    platform,
                    native,
                    is_loaded,
                    implementation,
                    vmap_dims,
                ),
                spec.chosen([i]),
            )
        return results

    def reference(self, *operands, vmap_dims, spec):
        leaves = zip(spec.axes, _batched(operands, spec.operands), strict=True)
        return [
            x
            for axis, (*leaf, grads) in leaves
            for x in adam_step(grads, *leaf, axis=axis, vmap_dims=vmap_dims)
        ]

    def cpu(self, *operands, vmap_dims, spec):
        leaves = list(zip(spec.axes, _batched(operands, spec.operands), strict=True))
        rows, keys, results, aliases = [], [], [], {}
        for i, (axis, (*leaf, keys_of_both, numbers, grads)) in enumerate(leaves):
            # The parameters, or else the gradients, and both moments are written over.
            first = len(rows) + spec.applies
            # The keys of all leaves are one operand: XLA computes them in one launch.
            keys.append(
                _to_rows(jnp.moveaxis(keys_of_both, vmap_dims, 0), axis).reshape(-1)
            )
            rows += [_to_rows(x, axis) for x in (grads, *leaf)]
            places = range(first, first + _ADAM_RESULTS)
            results += [(rows[place].shape, rows[place].dtype) for place in places]
            aliases |= dict(
                zip(
                    places,
                    range(_ADAM_RESULTS * i, _ADAM_RESULTS * (i + 1)),
                    strict=True,
                )
            )
            rows.append(numbers.reshape(-1, ADAM_NUMBERS))
        operands = *rows, jnp.concatenate(keys)
        new = _ffi.call(
            "adam_update", results, *operands, aliases=aliases, apply=spec.applies
        )
        shapes = [
            x.shape for _, leaf in leaves for x in (leaf[0], *leaf[spec.applies : -3])
        ]
        axes = [axis for axis in spec.axes for _ in range(_ADAM_RESULTS)]
        return list(map(_from_rows, new, axes, shapes))


_adam = _AdamUpdate()
_decode = _DecodeMoment()
_encode = _EncodeMoment()
