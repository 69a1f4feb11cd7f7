"""Pytrees: the type of a tree, and its arrays apart from leaves that tracing cannot
take, as flags and functions.
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


# A pytree or a model: the result has the type of the argument.
Tree = TypeVar("Tree")
