"""Between an op's dimensions and the canonical form of the custom calls: groups `[g, ...]` (common/README.md)."""

import functools
import math

import jax.numpy as jnp
from jax import lax

from ..numerics import _scaling


def merge(x, *counts):
    """`x` with consecutive dimensions merged: `counts` says how many go into each, the rest into the last.

    `merge(x, 2, 1)` of shape (a, b, c, d, e) has shape (a * b, c, d * e).
    """
    return x.reshape(merged(x.shape, *counts))


def merged(shape, *counts):
    """The shape that `merge` gives."""
    sizes, rest = [], shape
    for count in counts:
        sizes.append(math.prod(rest[:count]))
        rest = rest[count:]
    return (*sizes, math.prod(rest))


def pad(x, *widths):
    """`x` with zeros after the end of each dimension."""
    return jnp.pad(x, [(0, width) for width in widths]) if any(widths) else x


def group_scales(scale, members, batch=1):
    """The scale of each group: f32 `[*members, 1]` to `[1]`, one for all, or to `[g]`, `batch` groups a member."""
    if members == 0:
        return scale
    scale = scale.reshape(-1)
    return scale if batch == 1 else jnp.repeat(scale, batch)


def group_amaxes(amax, batch):
    """The amax so far of each group: f32 `[*members, 1]` to `[g]`, `batch` groups a member."""
    amax = amax.reshape(-1)
    return amax if batch == 1 else jnp.repeat(amax, batch)


def amax_buffers(so_far, with_amax, groups, batch=1):
    """The operand `amax_so_far` and the `(shape, dtype)` of the result `amax`: f32 `[groups]`, or `[0]` where not used.

    Args:
        so_far: the amaxes so far, f32 `[*members, 1]`, in a list of one; or an empty list.
        with_amax: whether the amax is a result.
        groups: how many.
        batch: groups a member.
    """
    operand = group_amaxes(*so_far, batch) if so_far else jnp.zeros((0,), jnp.float32)
    return operand, ((groups if with_amax else 0,), jnp.float32)


def member_amaxes(top, member_shape, batch=1):
    """The amax of each member: f32 `[g]`, `batch` groups a member, to `[*members, 1]`."""
    if batch != 1:
        top = _scaling.abs_max(top.reshape(math.prod(member_shape), batch), axis=1)
    return top.reshape(*member_shape, 1)


def abs_max(x, members):
    """The amax of each member of `x` in jnp: f32 `[*members, 1]`."""
    top = _scaling.abs_max(x, axis=tuple(range(members, x.ndim)))
    return top.reshape(*x.shape[:members], 1)


def raise_amax(top, *so_far):
    """The largest of f32 that are not negative: as integers, because XLA's CPU threads flush subnormal floats."""
    bits = (lax.bitcast_convert_type(x, jnp.uint32) for x in (top, *so_far))
    return lax.bitcast_convert_type(functools.reduce(jnp.maximum, bits), jnp.float32)


def stretch(scale, x):
    """A scale of each member, f32 `[*members, 1]`, in the rank of `x`."""
    return scale.reshape(*scale.shape[:-1], *[1] * (x.ndim - scale.ndim + 1))


def spread(scale, shape):
    """A scale of each member, f32 `[*members, 1]`, for each element of `shape`."""
    if scale.ndim > len(shape):
        return scale.reshape(shape)
    return lax.broadcast_in_dim(scale, shape, tuple(range(scale.ndim)))
