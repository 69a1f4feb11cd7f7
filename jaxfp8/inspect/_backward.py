"""Runs: what products see in their backward, on the host."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax._table import member
from ..dot import _contexts


class Runs:
    """Collects what the products of a program give the host in their backward.

    Attributes:
        products: by the layer its products, in the order of tracing, and of each
            product `(batch, tree)` of each of its runs: numpy arrays, and the sizes of
            the dimensions that every `vmap` put in front. A backward runs the
            iterations of a loop in reverse order, so that the last iteration comes
            first.
    """

    def __init__(self):
        self.products = defaultdict(list)

    def at_backward(self, y: jax.Array, operands: Any, look: Callable) -> jax.Array:
        """Return y, the result of a product, whose gradient is looked at where it
        arrives.

        Args:
            y: the result.
            operands: a tree of arrays for `look`, which get no gradient from here.
            look: `(operands, gradient of y) -> tree of arrays` for the host.
        """
        trees = []
        self.products[_contexts.current_layer() or "product"].append(trees)

        @jax.custom_vjp
        def watched(y, operands):
            return y

        def backward(operands, grad):
            tensors = look(operands, grad)

            def on_host(zeros, tensors):  # zeros for each member of a batch
                trees.append((zeros.shape, jax.tree.map(np.asarray, tensors)))
                return zeros

            zero = jnp.float32(0)
            zero = jax.pure_callback(
                on_host, zero, zero, tensors, vmap_method="broadcast_all"
            )
            # The gradient depends on a zero from the callback, without which XLA would
            # drop the callback.
            return jnp.where(zero == 0, grad, jnp.nan), None

        watched.defvjp(lambda y, operands: (y, operands), backward)
        return watched(y, jax.lax.stop_gradient(operands))

    def labelled(self) -> Iterator[tuple[str, Any]]:
        """Yield `(label, tree)` for each run, and each member of its batch.

        `label` is the layer, with ` (call 1)` for its second product, and `[i]` for an
        iteration of a loop and a member of a batch.
        """
        for layer, products in self.products.items():
            reached = list(filter(None, products))
            for call, runs in enumerate(reached):
                label = layer
                if len(reached) > 1:
                    label += f" (call {call})"
                for iteration, (batch, tree) in enumerate(runs[::-1]):
                    place = (iteration,) if len(runs) > 1 else ()
                    for index in np.ndindex(batch):
                        at_index = jax.tree.map(lambda x, index=index: x[index], tree)
                        yield label + member(place + index), at_index
