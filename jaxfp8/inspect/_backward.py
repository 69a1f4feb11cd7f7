"""at_backward: give the host what the backward of a product sees; and labelled_runs,
the names of what it got.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax._table import member


def at_backward(y: jax.Array, operands: Any, look: Callable, record: Callable) -> Any:
    """Return y, the result of a product, whose gradient is looked at where it arrives.

    Args:
        y: the result.
        operands: a tree of arrays for `look`, which get no gradient from here.
        look: `(operands, gradient of y) -> tree of arrays`.
        record: `(batch, tree) -> None`, which takes this tree on the host, as numpy
            arrays, and the sizes of the dimensions that every `vmap` put in front.
    """

    @jax.custom_vjp
    def watched(y, operands):
        return y

    def backward(operands, grad):
        tensors = look(operands, grad)
        rank = jax.tree.leaves(tensors)[0].ndim

        def on_host(tensors):
            tensors = jax.tree.map(np.asarray, tensors)
            shape = jax.tree.leaves(tensors)[0].shape
            batch = shape[: len(shape) - rank]
            record(batch, tensors)
            return np.zeros(batch, np.float32)

        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        zero = jax.pure_callback(on_host, scalar, tensors, vmap_method="broadcast_all")
        # The gradient depends on a zero from the callback, without which XLA would drop
        # the callback.
        return jnp.where(zero == 0, grad, jnp.nan), None

    watched.defvjp(lambda y, operands: (y, operands), backward)
    return watched(y, jax.lax.stop_gradient(operands))


def labelled_runs(
    products: Sequence[tuple[str, Sequence[tuple[tuple[int, ...], Any]]]],
) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Yield `(label, index, tree)` for each member of what the products recorded.

    Args:
        products: in the order of the program, the layer of each product and the
            `(batch, tree)` of its runs. A backward runs the iterations of a loop in
            reverse order, so that the last iteration comes first.

    Yields:
        `label` is the layer, with ` (call 1)` for its second product, and `[i]` for an
        iteration of a loop and a member of a batch; `index` is the member's place in
        the arrays of the tree.
    """
    products_of_layer = Counter(layer for layer, _ in products)
    calls = Counter()
    for layer, runs in products:
        label = layer
        if products_of_layer[layer] > 1:
            label += f" (call {calls[layer]})"
        calls[layer] += 1
        for i, (batch, tree) in enumerate(reversed(runs)):
            iteration = (i,) if len(runs) > 1 else ()
            for index in np.ndindex(batch):
                yield label + member(iteration + index), index, tree
