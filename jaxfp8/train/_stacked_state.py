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

from .._jax._trees import Tree
from ..recipes import OVERWRITE_WITH_GRADIENT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedState:
    """A collection of state, products that are alike stacked.

    Attributes:
        arrays: for each kind of product, under the path of its first product, the
            leaves by name, `[products, ...]`.
        treedef: the structure of the collection.
        places: for each leaf of the collection its kind, its name, and its row.
    """

    arrays: dict[str, dict[str, Any]]
    treedef: Any = dataclasses.field(metadata={"static": True})
    places: tuple = dataclasses.field(metadata={"static": True})

    @classmethod
    def stack(cls, collection: Any) -> Self:
        """Stack a collection."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(collection)
        # 1. Find the products, and those that are alike.
        products, places = {}, []
        for path, leaf in leaves:
            product, name = _product_and_name(path)
            products.setdefault(product, {})[name] = leaf
            places.append((product, name))
        alike = {}
        for product, named in products.items():
            kind = tuple((name, jax.typeof(leaf)) for name, leaf in named.items())
            alike.setdefault(kind, {})[product] = named
        # 2. Stack each kind.
        arrays, rows = {}, {}
        for group in alike.values():
            first = next(iter(group))
            arrays[first] = jax.tree.map(lambda *rows: jnp.stack(rows), *group.values())
            rows |= {product: (first, row) for row, product in enumerate(group)}
        # 3. Note where each leaf went.
        for i, (product, name) in enumerate(places):
            kind, row = rows[product]
            places[i] = kind, name, row
        return cls(arrays, treedef, tuple(places))

    def unstacked(self) -> Any:
        """Return the collection. A list of rows stands for their array."""
        rows = jax.tree.map(
            lambda leaf: leaf if isinstance(leaf, list) else jnp.unstack(leaf),
            self.arrays,
            is_leaf=lambda node: isinstance(node, list),
        )
        return self.treedef.unflatten(
            [rows[kind][name][row] for kind, name, row in self.places]
        )


def _product_and_name(path) -> tuple[str, str]:
    *product, name = (jax.tree_util.keystr((key,), simple=True) for key in path)
    return "/".join(product), name


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

    def stacked(path, child):
        is_collection = _product_and_name(path)[1] == OVERWRITE_WITH_GRADIENT
        if not is_collection or _is_stacked(child):
            return child
        return StackedState.stack(child)

    def stacked_variables(node):
        if not _is_variables(node):
            return node
        return jax.tree_util.tree_map_with_path(
            stacked, node, is_leaf=lambda child: child is not node
        )

    return jax.tree.map(stacked_variables, tree, is_leaf=_is_variables)


def unstack_state(tree: Tree) -> Tree:
    """Undo `stack_state`: return `tree` with the state of each product under its own
    names, to the bit. A tree without stacked state stays as it is.
    """
    return jax.tree.map(
        lambda node: node.unstacked() if _is_stacked(node) else node,
        tree,
        is_leaf=_is_stacked,
    )


def leaves_in_stacks(tree: Any) -> list[bool]:
    """Tell of each leaf of a tree whether it is in a StackedState."""

    def marked(node):
        return jax.tree.map(lambda _: _is_stacked(node), node)

    return jax.tree.leaves(jax.tree.map(marked, tree, is_leaf=_is_stacked))


def _is_stacked(node) -> bool:
    return isinstance(node, StackedState)


def _is_variables(node) -> bool:
    return isinstance(node, Mapping) and OVERWRITE_WITH_GRADIENT in node
