"""The moments of an optimizer in FP8: classes of its state, and functions that encode
and decode moments.

A moment has blocks of 128 elements along one axis, of which the last may be smaller.
The shape of a moment tells the axis, so a moment needs no static field: checkpoints,
`jax.vmap` and shardings see a tuple of arrays.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .. import ops
from .._jax._mesh import axes_of
from ..numerics import E4M3

_NARROWEST = 64
_INF_CODE = np.uint8(0xFF)
_INF_BITS, _NEGATIVE_NAN_BITS = np.uint32(0x7F800000), np.uint32(0xFFC00000)


def block_axis(shape):
    """Return the axis along which blocks lie: the last axis with at least 64 elements,
    else the last largest axis.

    The last axis of a kernel or an embedding has the features of one input or one
    token, whose moments are similar.
    """
    wide = [axis for axis, size in enumerate(shape) if size >= _NARROWEST]
    if wide:
        return wide[-1]
    return max(range(len(shape)), key=lambda axis: (shape[axis], axis))


def amax_shape(shape):
    """Return the shape of an array with one number for each block."""
    axis = block_axis(shape)
    return (*shape[:axis], -(-shape[axis] // ops.MOMENT_BLOCK), *shape[axis + 1 :])


def block_sharding(sharding, shape):
    """Return the sharding of an array with one number for each block of a moment.

    Axes of the mesh that do not divide the number of blocks are left out.

    Args:
        sharding: the sharding of the moment.
        shape: the `amax_shape` of the moment.
    """

    def divisible(size, axes):
        devices = math.prod(map(sharding.mesh.shape.get, axes_of(axes)))
        return axes if size % devices == 0 else None

    return NamedSharding(
        sharding.mesh, PartitionSpec(*map(divisible, shape, sharding.spec))
    )


class Moment(NamedTuple):
    """A moment in FP8, in one of two subclasses, which say how updates round the
    moment.

    Attributes:
        data: float8_e4m3fn codes, in the shape of the moment.
        amax: f32, the largest finite magnitude of each block of 128 elements along one
            axis; 0 for a block of zeros.
        exponent: int8, the binary logarithm of k for each block: 1, 0 or -1; see
            `ops.encode_moment`.
    """

    data: jax.Array
    amax: jax.Array
    exponent: jax.Array


class SignedMoment(Moment):
    """A moment of both signs, such as Adam's first moment. An update rounds
    stochastically, and keeps the mean.

    To nearest, a moment would not follow a gradient that turns round: the steps of an
    average can be smaller than half of the spacing of codes.
    """


class SquaredMoment(Moment):
    """A moment of squares, such as Adam's second moment. An update rounds
    stochastically, and only 0 becomes 0.

    The steps of a slow average are smaller than half of the spacing of codes, so
    rounding to nearest would lose them. An optimizer divides by the root of the moment,
    so a small number that became 0 would make an update without bounds.
    """


# which has a mesh of type Explicit, without `jax.set_mesh`
@functools.partial(jax.jit, static_argnums=0, inline=True)
def encode(kind, x):
    """Quantize x, of any float dtype and shape, to a moment of the class `kind`; round
    to nearest.
    """
    sharding, blocks = jax.typeof(x).sharding, amax_shape(x.shape)
    of_blocks = block_sharding(sharding, blocks)
    zeros = kind(
        lax.full(x.shape, 0, E4M3.dtype, sharding=sharding),
        lax.full(blocks, 0, jnp.float32, sharding=of_blocks),
        lax.full(blocks, 1, jnp.int8, sharding=of_blocks),
    )
    return encode_changes(zeros, x, None)


def decode(moment):
    """Compute the f32 elements of a moment, also of a stack of moments that `jax.vmap`
    made.

    Blocks are along the axis on which there are fewer blocks than elements; if there is
    none, all axes do.
    """
    axis = block_axis(moment.data.shape)
    for i, size in enumerate(moment.data.shape):
        if size != moment.amax.shape[i]:
            axis = i
            break
    x = ops.decode_moment(*moment, axis=axis)
    if not isinstance(moment, SquaredMoment):
        return x
    return jnp.where(moment.data.view(jnp.uint8) == _INF_CODE, np.float32(np.inf), x)


def encode_changes(moment, after, keys):
    """Quantize the blocks of `after` that differ from the decoded `moment`; keep the
    codes of the other blocks.

    So a step of `optax.MultiSteps` or `optax.apply_if_finite` that leaves the moment
    alone changes no bit of it.

    Args:
        moment: the moment of the step before.
        after: the next moment, in any float dtype; it is cast to f32.
        keys: the result of `block_keys`, to round stochastically; None rounds to
            nearest.
    """
    squared, axis = isinstance(moment, SquaredMoment), block_axis(after.shape)
    after = after.astype(jnp.float32)
    if squared:
        # The sum of squares that overflows is Inf, by which a parameter does not move.
        # Codes have no Inf, squares no sign: a NaN with a sign stands for it.
        bits = after.view(jnp.uint32)
        after = jnp.where(bits == _INF_BITS, _NEGATIVE_NAN_BITS, bits).view(jnp.float32)
    return type(moment)(
        *ops.encode_moment(*moment, after, keys, squared=squared, axis=axis)
    )
