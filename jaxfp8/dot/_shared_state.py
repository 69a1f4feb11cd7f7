"""The state of a product for autodiff: the cotangents of all its uses meet in a max."""

import functools

import jax
import jax.numpy as jnp

from .._jax import _compat
from ..recipes import is_reading


def shared(state):
    """Return `state` as f32, such that the cotangents of all uses of its leaves meet in a max.

    A reading stays as it is: a loop keeps its inputs for the backward anyway, and a conversion would be a copy.
    """

    def use(leaf):
        if is_reading(leaf):
            return leaf
        if _compat.is_foreign_max(leaf):
            return _from_foreign_max(leaf, leaf.dtype)
        if _compat.is_max(leaf):
            return _compat.from_max(leaf)
        if _compat.MAX_DTYPE is not None and isinstance(leaf, jax.core.Tracer):
            return _compat.from_max(_compat.to_max(leaf))
        return jnp.asarray(leaf).astype(jnp.float32)

    return jax.tree.map(use, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _from_foreign_max(leaf, dtype):
    """Convert Flax's dtype to float32; JAX's conversion from that dtype has no transpose."""
    return jax.lax.convert_element_type(leaf, jnp.float32)


def _from_foreign_max_fwd(leaf, dtype):
    return _from_foreign_max(leaf, dtype), None


def _from_foreign_max_bwd(dtype, residuals, ct):
    return (jax.lax.convert_element_type(ct, dtype),)


_from_foreign_max.defvjp(_from_foreign_max_fwd, _from_foreign_max_bwd)
