"""adam_update: a whole step of Adam on moments in FP8, for many leaves at once."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._jax import _compat
from ..numerics._moment_codec import adam_step
from . import _ffi
from ._encode_moment import moment_names
from ._partition import WHOLE
from ._primitive import Op

# the largest number of leaves in one call of `adam_update`
MAX_LEAVES = 16


class AdamLeaf(NamedTuple):
    """A leaf of the parameters, as `adam_update` takes it.

    Attributes:
        grads: f32, of any shape.
        params: f32 in that shape; None where the update is the result, and not the next
            parameters.
        mu, nu: the moments, each a tree of data, amax and exponent.
        keys: u32 `[2, ...]`, for mu and for nu in the shape of its amaxes, for the
            random bits of rounding, as in `encode_moment`.
        numbers: f32 `[11]`: b1, 1 - b1, b2, 1 - b2, the inverses of 1 - b1**t and 1 -
            b2**t, eps_root, eps, the learning rate, the weight decay, and a factor on
            the gradient, by which it is clipped.
    """

    grads: jax.Array
    params: jax.Array | None
    mu: Any
    nu: Any
    keys: jax.Array
    numbers: jax.Array


def adam_update(leaves, axes):
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
        For each leaf `(p, mu, nu)`, without params `(u, mu, nu)`, the moments in the
        trees that came. In place, where XLA finds that it can: p in params, u in grads.
    """
    results = []
    for part in _batched(list(zip(leaves, axes, strict=True)), MAX_LEAVES):
        operands = []
        for leaf, axis in part:
            # Keys have one dimension more in front: count the axis from the end.
            axis -= leaf.grads.ndim
            arrays = jax.tree.leaves(leaf._replace(numbers=None))
            # Gradients come last: where XLA would cut them along another axis, results
            # are cut as what they replace.
            grads, *rest = (jnp.moveaxis(x, axis, -1) for x in arrays)
            operands += [*rest, leaf.numbers, grads]
        op = _AdamUpdate(part[0][0].params is not None)
        stepped = _batched(op(*operands), _ADAM_RESULTS)
        for (leaf, axis), arrays in zip(part, stepped, strict=True):
            treedef = jax.tree.structure((leaf.grads, leaf.mu, leaf.nu))
            results.append(treedef.unflatten(jnp.moveaxis(x, -1, axis) for x in arrays))
    return results


_ADAM_RESULTS = 7  # of a leaf


def _batched(items, count):
    return [items[i : i + count] for i in range(0, len(items), count)]


class _AdamUpdate(Op):
    """The operands are those of several leaves, of which blocks cut the last axis;
    `applies` says whether parameters are given and stepped.
    """

    name = "adam_update"
    applies: bool

    @property
    def count(self):
        """The number of operands of a leaf."""
        return 9 + self.applies

    def names(self, *ranks):
        operands, results = [], []
        for i, rank in enumerate(ranks[:: self.count]):
            elements, blocks = moment_names(rank, f"leaf{i}_")
            moments = 2 * [elements, blocks, blocks]
            operands += [elements] * self.applies + moments
            operands += [
                ((f"{WHOLE}_moment{i}",), *blocks),
                ((), (f"{WHOLE}_numbers{i}",)),
            ]
            operands.append(elements)
            results += [elements, *moments]
        return operands, results

    def dtypes(self, *operands):
        moment = [x.dtype for x in operands[self.applies :][:3]]
        return [jnp.float32, *moment, *moment] * (len(operands) // self.count)

    def lower(self, platform, ctx, *operands):
        """Lower each leaf by itself on a mesh, which may cut each along other axes."""
        if _compat.devices_of(ctx) != "mesh":
            return super().lower(platform, ctx, *operands)
        results = []
        types_in = _batched(ctx.avals_in, self.count)
        types_out = _batched(ctx.avals_out, _ADAM_RESULTS)
        for i, leaf in enumerate(_batched(operands, self.count)):
            of_leaf = ctx.replace(avals_in=types_in[i], avals_out=types_out[i])
            results += super().lower(platform, of_leaf, *leaf)
        return results

    def reference(self, *operands):
        return [
            x
            for leaf in _batched(operands, self.count)
            for x in adam_step(*leaf, vmap_dims=self.vmap_dims)
        ]

    def cpu(self, *operands):
        types = self.results(*operands)
        arrays, results = self.in_groups(operands, types)
        groups, keys, aliases = [], [], {}
        for *leaf, of_both, numbers, grads in _batched(arrays, self.count):
            # The parameters, or else the gradients, and both moments are written over.
            first = len(groups) + self.applies
            for place in range(first, first + _ADAM_RESULTS):
                aliases[place] = len(aliases)
            groups += [grads, *leaf, numbers]
            # The keys of all leaves are one operand, those of mu first: XLA computes
            # them in one launch.
            vmapped, *blocks = of_both.shape
            of_both = of_both.reshape(vmapped // 2, 2, *blocks)
            keys.append(jnp.moveaxis(of_both, 1, 0).reshape(-1))
        operands = *groups, jnp.concatenate(keys)
        new = _ffi.call(
            "adam_update", results, *operands, aliases=aliases, apply=self.applies
        )
        return [x.reshape(old.shape) for x, old in zip(new, types, strict=True)]
