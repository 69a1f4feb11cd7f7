"""Between an op's dimensions and the canonical form of the custom calls: groups `[g, ...]` (common/README.md)."""

import math

import jax.numpy as jnp
from jax import lax

from .. import scaling


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


def member_amaxes(top, member_shape, batch=1):
    """The amax of each member: f32 `[g]`, `batch` groups a member, to `[*members, 1]`."""
    if batch != 1:
        top = scaling.abs_max(top.reshape(math.prod(member_shape), batch), axis=1)
    return top.reshape(*member_shape, 1)


def member_counts(words, member_shape, batch=1):
    """The counts of each member, f32 `[*members, 2]`: those of a custom call, u32 `[g, 4]`, `batch` groups a member.

    A count is two words, the low one first. Up to 2**24 the sums are exact.
    """
    words = words.reshape(*member_shape, batch, 2, 2).astype(jnp.float32)
    return jnp.sum(words[..., 0] + words[..., 1] * jnp.float32(2.0**32), axis=-2)


def abs_max(x, members):
    """The amax of each member of `x` in jnp: f32 `[*members, 1]`."""
    top = scaling.abs_max(x, axis=tuple(range(members, x.ndim)))
    return top.reshape(*x.shape[:members], 1)


def raise_amax(amax, top):
    """The larger of two f32 that are not negative: as integers, because XLA's CPU threads flush subnormal floats."""
    bits = (lax.bitcast_convert_type(x, jnp.uint32) for x in (amax, top))
    return lax.bitcast_convert_type(jnp.maximum(*bits), jnp.float32)


def stretch(scale, x):
    """A scale of each member, f32 `[*members, 1]`, in the rank of `x`."""
    return scale.reshape(*scale.shape[:-1], *[1] * (x.ndim - scale.ndim + 1))


def spread(scale, shape):
    """A scale of each member, f32 `[*members, 1]`, for each element of `shape`."""
    if scale.ndim > len(shape):
        return scale.reshape(shape)
    return lax.broadcast_in_dim(scale, shape, tuple(range(scale.ndim)))
