"""Pytrees and models: the type of a tree, its arrays apart from leaves that tracing
cannot take, as flags and functions, which of its leaves are in nodes of a class, and
copies of a model in another class.
"""

from typing import TypeVar

import jax


def is_array(leaf):
    """Tell whether a leaf has what tracing needs, a shape and a dtype:
    `jax.ShapeDtypeStruct` counts as an array.
    """
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def split_arrays(tree, is_split=is_array):
    """Return `(arrays, joined)`: the leaves where `is_split` is true, and the function
    that puts arrays back.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def joined(arrays):
        arrays = iter(arrays)
        return treedef.unflatten(
            [next(arrays) if is_split(leaf) else leaf for leaf in leaves]
        )

    return list(filter(is_split, leaves)), joined


def leaves_in(tree, kind: type) -> list[bool]:
    """Tell of each leaf of a tree whether it is in a node of a class."""

    def is_kind(node):
        return isinstance(node, kind)

    in_nodes = jax.tree.map(is_kind, tree, is_leaf=is_kind)
    return jax.tree.leaves(jax.tree.broadcast(in_nodes, tree))


def with_class(cls, instance):
    """Return a shallow copy of an object that is an instance of `cls`."""
    copied = object.__new__(cls)
    vars(copied).update(vars(instance))
    return copied


# A pytree or a model: the result has the type of the argument.
Tree = TypeVar("Tree")
