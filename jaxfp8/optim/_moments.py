"""The moments of an optimizer in FP8, as parts of its state: `jaxfp8.ops` decodes and encodes them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..numerics import E4M3
from ..ops import _moments as ops
from ._blocks import amax_shape, block_axis, block_sharding


class Moment(NamedTuple):
    """A moment in FP8; its class says how it is rounded.

    Attributes:
        data: float8_e4m3fn codes, in the shape of the moment.
        amax: f32, the largest finite magnitude of each block of 128 elements along one axis; 0 where all are 0.
        exponent: int8, the binary logarithm of the k of each block: 1, 0 or -1.
    """

    data: jax.Array
    amax: jax.Array
    exponent: jax.Array


class SignedMoment(Moment):
    """A moment of both signs, such as Adam's first: rounded to nearest."""


class SquaredMoment(Moment):
    """A moment of squares, such as Adam's second: rounded stochastically, and to zero only where it is zero.

    The steps of its slow average are smaller than half of the spacing of codes: to nearest, they would be lost. An
    optimizer divides by its root: a zero in place of a small number would be an update without bounds.
    """


def encode(kind: type[Moment], x: jax.Array) -> Moment:
    """Quantize a moment, in any float dtype, to nearest.

    Returns:
        The moment, in the class `kind`.
    """
    sharding = jax.typeof(x).sharding
    of_blocks = block_sharding(sharding, amax_shape(x.shape))

    def full(shape, value, dtype, sharding):
        return lax.full(shape, value, dtype, sharding=None if sharding.mesh.empty else sharding)

    zeros = kind(
        full(x.shape, 0, E4M3.dtype, sharding),
        full(amax_shape(x.shape), 0, jnp.float32, of_blocks),
        full(amax_shape(x.shape), 1, jnp.int8, of_blocks),
    )
    return encode_changes(zeros, x, None)


def decode(moment: Moment) -> jax.Array:
    """Compute the f32 elements of a moment."""
    return ops.decode_moment(*moment, axis=block_axis(moment.data.shape))


def encode_changes(moment: Moment, after: jax.Array, keys: jax.Array | None) -> Moment:
    """Quantize `after` where a block differs from what `moment` decodes to; keep the codes of other blocks.

    So a step that changes nothing, of `optax.MultiSteps` or `optax.apply_if_finite`, changes no bit.

    Args:
        moment: of the step before.
        after: in any float dtype; f32 is what it is computed in.
        keys: of `block_keys`, to round stochastically; None: to nearest.
    """
    squared, axis = isinstance(moment, SquaredMoment), block_axis(after.shape)
    return type(moment)(*ops.encode_moment(*moment, after.astype(jnp.float32), keys, squared=squared, axis=axis))
