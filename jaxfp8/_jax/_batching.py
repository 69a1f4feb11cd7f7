"""What batching rules share: a batch in front of each operand, also of those that the
examples share.
"""

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from . import _compat


def batch_of(args, dims):
    """Return the size of a batch, and the mesh axis that cuts it."""
    pairs = zip(args, dims, strict=True)
    x, d = next((x, d) for x, d in pairs if d is not None)
    return x.shape[d], jax.typeof(x).sharding.spec[d]


def in_front(batch, x, dim, repeated):
    """Return `x` with the batch as its first dimension; where it has none, repeated by
    `repeat` or `repeat_state`.
    """
    if dim is None:
        return repeated(batch, x)
    # A moved array would be one of the innermost trace.
    return x if dim == 0 else jnp.moveaxis(x, dim, 0)


def repeat(batch, x):
    """Repeat `x` for each example of a batch."""
    size, mesh_axis = batch
    return batching.broadcast(x, size, 0, mesh_axis=mesh_axis)


# `repeat_state` is `repeat` for state: the next states of the examples combine by max.
repeat_state = jax.custom_vjp(repeat, nondiff_argnums=(0,))


def _repeat_state_fwd(batch, x):
    return repeat(batch, x), None


def _repeat_state_bwd(batch, residuals, ct):
    return (_compat.largest(ct),)


repeat_state.defvjp(_repeat_state_fwd, _repeat_state_bwd)
