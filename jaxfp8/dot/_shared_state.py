"""The state of a product as autodiff sees it: its uses meet in a max."""

import jax
import jax.numpy as jnp

from .._jax import _compat


def shared(state):
    """`state` as f32, such that the cotangents of all uses of its leaves meet in a max."""

    def use(leaf):
        if _compat.is_max(leaf):
            return _compat.from_max(leaf)
        if _compat.MAX_DTYPE is not None and isinstance(leaf, jax.core.Tracer):
            return _compat.from_max(_compat.to_max(leaf))
        return jnp.asarray(leaf).astype(jnp.float32)

    return jax.tree.map(use, state)
