"""at_backward: give the host what the backward of a product sees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def at_backward(y: jax.Array, operands: Any, look: Callable, record: Callable) -> Any:
    """Return y, the result of a product, whose gradient is looked at where it arrives.

    Args:
        y: the result.
        operands: a tree of arrays for `look`, which get no gradient from here.
        look: `(operands, gradient of y) -> tree of arrays`.
        record: takes this tree on the host, as numpy arrays, with the dimensions of
            every `vmap` in front; returns their sizes.
    """

    def on_host(seen):
        return np.zeros(record(jax.tree.map(np.asarray, seen)), np.float32)

    @jax.custom_vjp
    def watched(y, operands):
        return y

    def backward(operands, grad):
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        seen = look(operands, grad)
        zero = jax.pure_callback(on_host, scalar, seen, vmap_method="broadcast_all")
        # The gradient depends on a zero from the callback, without which XLA would drop
        # the callback.
        return jnp.where(zero == 0, grad, jnp.nan), None

    watched.defvjp(lambda y, operands: (y, operands), backward)
    return watched(y, jax.lax.stop_gradient(operands))
