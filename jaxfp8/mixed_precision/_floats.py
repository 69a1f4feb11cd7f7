"""Find the floats of a tree that mixed precision may cast, which FP8 state, codes and their scales are not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..dot import _frozen
from ..recipes import QTensor, _state_tree

_FLOATS = {np.dtype(t) for t in (np.float16, jnp.bfloat16, np.float32, np.float64)}
_COMPLEX = {np.dtype(t) for t in (np.complex64, np.complex128)}


def is_float(leaf) -> bool:
    """Return whether `leaf` is an array of float16, bfloat16, float32 or float64."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype in _FLOATS


def is_inexact(leaf) -> bool:
    """Return whether `leaf` is a Python float, or an array of floats or complex numbers."""
    return isinstance(leaf, (float, complex)) or is_float(leaf) or getattr(leaf, "dtype", None) in _COMPLEX


def outside_state(tree):
    """Return the tree with True for leaves that are neither FP8 state nor codes: parameters, `source` of QTensors.

    The codes and scales of frozen products get False too.
    """
    # 1. Find FP8 state, and the leaves of frozen products, which lie beside a `kernel_scale_inv`.
    flat = _state_tree.flatten(tree)
    frozen = {path[:-1] for path in flat.paths if path[-1:] == (_frozen.KERNEL_SCALE_INV,)}
    state = set(flat.positions())
    inside = [i in state or path[:-1] in frozen for i, path in enumerate(flat.paths)]

    # 2. Give True to the `source` of a QTensor, and False to its codes and scales.
    def visit(leaf, is_inside):
        if not isinstance(leaf, QTensor):
            return not is_inside
        structure = jax.tree.structure(leaf)
        nothing = structure.unflatten([False] * structure.num_leaves)
        return dataclasses.replace(nothing, source=None if leaf.source is None else True)

    return jax.tree.map(visit, tree, flat.treedef.unflatten(inside), is_leaf=_is_qtensor)


def _is_qtensor(x) -> bool:
    return isinstance(x, QTensor)


def map_outside_state(function, tree):
    """Apply `function` to all leaves that are neither FP8 state nor codes; state and codes stay as they are."""

    def visit(leaf, is_outside):
        return function(leaf) if is_outside else leaf

    return jax.tree.map(visit, tree, outside_state(tree))
