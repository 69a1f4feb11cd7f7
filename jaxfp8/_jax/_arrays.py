"""Split the arrays of a tree from its other leaves, such as flags and functions, so that a function can be traced."""

import jax


def split_arrays(tree):
    """Return `(arrays, joined)`: the leaves with a shape and a dtype, and the function that puts arrays back."""
    leaves, treedef = jax.tree.flatten(tree)
    # A shape and a dtype are all that tracing needs: `jax.ShapeDtypeStruct` counts as an array.
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def joined(arrays):
        arrays = iter(arrays)
        return treedef.unflatten(
            [next(arrays) if traced else leaf for leaf, traced in zip(leaves, is_array, strict=True)]
        )

    return [leaf for leaf, traced in zip(leaves, is_array, strict=True) if traced], joined
