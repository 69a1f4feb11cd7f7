"""Reshape between an op's dimensions and the canonical form of custom calls: groups `[g, ...]` (common/README.md)."""

import functools
import math

import jax.numpy as jnp
from jax import lax

from ..numerics import _scaling


def merge(x, *counts):
    """Merge consecutive dimensions of `x`: each count merges that many; the last dimension gets the rest.

    `merge(x, 2, 1)` of shape (a, b, c, d, e) has shape (a * b, c, d * e).
    """
    return x.reshape(merged(x.shape, *counts))


def merge_groups(x, leading, *counts):
    """Merge the leading dimensions of `x` to a group dimension, and the others as `merge` does.

    Without leading dimensions there is one group, and no dimension for it: a custom call whose operands may lack it
    needs no reshapes.
    """
    return merge(x, leading, *counts) if leading else merge(x, *counts)


def merged(shape, *counts):
    """Return the shape that `merge` gives."""
    sizes, rest = [], shape
    for count in counts:
        sizes.append(math.prod(rest[:count]))
        rest = rest[count:]
    return (*sizes, math.prod(rest))


def parts(shape, rows, cols):
    """Return the leading dimensions of a shape, those of the rows, and those of the columns, which come last."""
    first = len(shape) - rows - cols
    return shape[:first], shape[first : first + rows], shape[first + rows :]


def pad(x, *widths):
    """Pad `x` with zeros after the end of each of its last dimensions."""
    leading = [(0, 0)] * (x.ndim - len(widths))
    return jnp.pad(x, leading + [(0, width) for width in widths]) if any(widths) else x


def transpose(x, rows, cols):
    """Move the last `cols` dimensions of `x` before the `rows` dimensions in front of them."""
    first = x.ndim - rows - cols
    return jnp.transpose(x, (*range(first), *range(first + rows, x.ndim), *range(first, first + rows)))


def group_scales(scale, vmap_dims, batch=1):
    """Return the scale of each group: f32 `[*vmapped, 1]` as `[1]`, one for all groups, or as `[g]`.

    Args:
        scale: f32 `[*vmapped, 1]`, a scale for each index of the vmapped dimensions.
        vmap_dims: the number of vmapped dimensions.
        batch: the number of groups of each index.
    """
    # Handlers take one scale for all groups, so it is not repeated for each of them.
    return scale if vmap_dims == 0 else group_amaxes(scale, batch)


def group_amaxes(amax, batch):
    """Return the amax so far of each group: f32 `[*vmapped, 1]` as `[g]`, `batch` groups for each index."""
    amax = amax.reshape(-1)
    return amax if batch == 1 else jnp.repeat(amax, batch)


def vmapped_amaxes(amaxes, vmapped, batch=1):
    """Return the amax of each vmapped index: f32 `[g]`, `batch` groups an index, as `[*vmapped, 1]`."""
    # The groups of a batch have one amax together.
    if batch != 1:
        amaxes = _scaling.abs_max(amaxes.reshape(math.prod(vmapped), batch), axis=1)
    return amaxes.reshape(*vmapped, 1)


def abs_max(x, vmap_dims):
    """Compute in jnp the amax of each vmapped index of `x`: f32 `[*vmapped, 1]`."""
    amax = _scaling.abs_max(x, axis=tuple(range(vmap_dims, x.ndim)))
    return amax.reshape(*x.shape[:vmap_dims], 1)


def raise_amax(amax, *amax_so_far):
    """Return the largest of non-negative f32 arrays, compared as integers: XLA's CPU threads flush subnormal floats."""
    bits = (lax.bitcast_convert_type(x, jnp.uint32) for x in (amax, *amax_so_far))
    return lax.bitcast_convert_type(functools.reduce(jnp.maximum, bits), jnp.float32)


def stretch(scale, x):
    """Reshape a scale of each vmapped index, f32 `[*vmapped, 1]`, to the rank of `x`."""
    return scale.reshape(*scale.shape[:-1], *[1] * (x.ndim - scale.ndim + 1))


def spread(scale, shape):
    """Repeat a scale of each vmapped index, f32 `[*vmapped, 1]`, for each element of `shape`."""
    if scale.ndim > len(shape):
        return scale.reshape(shape)
    return lax.broadcast_in_dim(scale, shape, tuple(range(scale.ndim)))
