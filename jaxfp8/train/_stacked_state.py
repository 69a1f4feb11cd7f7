"""stack_state and unstack_state: the FP8 state of a model in few arrays, and back.

JAX starts a program in less time the fewer arrays it takes and returns, and a product
has six leaves of state. Products whose leaves are alike become rows of one array for
each leaf, as the layers of a scan are: `max_grad` reads the rows, and `update_state`
writes them, with one launch each.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from .._jax._trees import Tree
from ..recipes import OVERWRITE_WITH_GRADIENT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedState:
    """A collection of state, products that are alike stacked.

    Attributes:
        arrays: for each kind of product, under the path of its first product, the
            leaves by name, `[products, ...]`.
        products: for each kind the paths of its products, in the order of their rows.
    """

    arrays: dict[str, dict[str, Any]]
    products: tuple = dataclasses.field(metadata={"static": True})

    @classmethod
    def stack(cls, collection: Any) -> Self:
        """Stack a collection."""
        # 1. Find the products, and those that are alike.
        products, alike, arrays = {}, {}, {}
        for (*product, name), leaf in sorted(flatten_dict(collection).items()):
            products.setdefault(tuple(product), {})[name] = leaf
        for product, leaves in products.items():
            kind = tuple((name, jax.typeof(leaf)) for name, leaf in leaves.items())
            alike.setdefault(kind, {})[product] = leaves
        # 2. Stack each kind.
        for group in alike.values():
            first = "/".join(next(iter(group)))
            arrays[first] = jax.tree.map(lambda *rows: jnp.stack(rows), *group.values())
        return cls(arrays, tuple(map(tuple, alike.values())))

    def unstacked(self) -> Any:
        """Return the collection. A list of rows stands for their array."""
        collection = {}
        for products in self.products:
            for name, rows in self.arrays["/".join(products[0])].items():
                if not isinstance(rows, list):
                    rows = jnp.unstack(rows)
                for product, row in zip(products, rows, strict=True):
                    collection[*product, name] = row
        return unflatten_dict(collection)


def stack_state(tree: Tree) -> Tree:
    """Stack the FP8 state of products that are alike, so that a step takes and returns
    few arrays.

        variables = jaxfp8.train.stack_state(model.init(key, x))
        train = jaxfp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables, tx=tx
        )

    For each leaf, state of n products f32 `[...]` becomes one array `[n, ...]`; the
    numbers stay. Products are alike whose leaves have the same names, shapes and
    dtypes. `jaxfp8.grad`, `max_grad`, the `apply_fn` of `jaxfp8.linen.TrainState` and
    models of `jaxfp8.quantize` give a model its own state; another `apply` needs
    `unstack_state`. Gradients, optimizers, `update_state`, `accumulate_gradients` and
    `average` take stacked trees as any other.

    Checkpoints of `flax.serialization` hold the state of each product, and fit
    variables that are stacked or not. For other checkpoints save `unstack_state(train)`
    and restore by `stack_state(restored)`. With `optax.MultiSteps` the state of
    mini-steps in `opt_state` stays stacked; `create` makes it of stacked variables.

    Args:
        tree: the variables of a Linen model, with their collection
            `_overwrite_with_gradient`, or a tree with variables inside, such as a
            TrainState; arrays or tracers (for shapes use `jax.eval_shape`).

    Returns:
        `tree`, its state stacked. State that is stacked already, or outside of such a
        collection, stays as it is.
    """

    def stacked(node):
        if not _is_variables(node) or _is_stacked(node[OVERWRITE_WITH_GRADIENT]):
            return node
        collection = StackedState.stack(node[OVERWRITE_WITH_GRADIENT])
        return type(node)({**node, OVERWRITE_WITH_GRADIENT: collection})

    return jax.tree.map(stacked, tree, is_leaf=_is_variables)


def unstack_state(tree: Tree) -> Tree:
    """Undo `stack_state`: return `tree` with the state of each product under its own
    names, to the bit. A tree without stacked state stays as it is.
    """
    return jax.tree.map(
        lambda node: node.unstacked() if _is_stacked(node) else node,
        tree,
        is_leaf=_is_stacked,
    )


def _is_stacked(node) -> bool:
    return isinstance(node, StackedState)


def _is_variables(node) -> bool:
    return isinstance(node, Mapping) and OVERWRITE_WITH_GRADIENT in node
