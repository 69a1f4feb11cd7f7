"""Blocks of 128 elements along one axis of a moment, of which the last may be smaller.

The shape of a moment tells the axis, so a moment needs no static field: checkpoints, `jax.vmap` and shardings see a
tuple of arrays.
"""

import math

from jax.sharding import NamedSharding, PartitionSpec

from ..ops import _moments

_NARROWEST = 64


def block_axis(shape: tuple[int, ...]) -> int:
    """Return the axis along which blocks lie: the last axis with at least 64 elements, else the last largest axis.

    The last axis of a kernel or an embedding has the features of one input or one token, whose moments are similar.
    """
    wide = [axis for axis, size in enumerate(shape) if size >= _NARROWEST]
    return wide[-1] if wide else max(range(len(shape)), key=lambda axis: (shape[axis], axis))


def amax_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array with one number for each block."""
    axis = block_axis(shape)
    return (*shape[:axis], -(-shape[axis] // _moments.BLOCK), *shape[axis + 1 :])


def block_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of an array with one number for each block of a moment.

    Axes of the mesh that do not divide the number of blocks are left out.

    Args:
        sharding: the sharding of the moment.
        shape: the `amax_shape` of the moment.
    """

    def divisible(size, axes):
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        return axes if size % math.prod(sharding.mesh.shape[name] for name in names) == 0 else None

    return NamedSharding(sharding.mesh, PartitionSpec(*map(divisible, shape, sharding.spec)))
