"""The floats of a tree that mixed precision may cast, which FP8 state and codes are
not; whether all are finite.
"""

import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jax import _mesh
from .._jax._trees import Tree, leaves_in
from ..dot import _frozen
from ..recipes import QTensor, _state_tree

_FLOATS = np.float16, jnp.bfloat16, np.float32, np.float64
_FROZEN = (_frozen.KERNEL_SCALE_INV,)


def is_float(leaf) -> bool:
    """Return whether `leaf` is an array of float16, bfloat16, float32 or float64."""
    return (
        isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype in _FLOATS
    )


def is_inexact(leaf) -> bool:
    """Return whether `leaf` is a Python float, or an array of floats or complex
    numbers.
    """
    return is_float(leaf) or isinstance(leaf, float) or np.iscomplexobj(leaf)


def outside_state(tree, is_kind) -> tuple[_state_tree.StateTree, list[int]]:
    """Return the flat tree, and the positions of the leaves for which `is_kind(leaf)`
    is true and that are neither FP8 state nor codes: parameters, `source` of QTensors.

    The codes and scales of frozen products, which lie beside a `kernel_scale_inv`, are
    codes too.
    """
    flat = _state_tree.flatten(tree)
    in_qtensors = leaves_in(tree, QTensor)
    frozen = {path[:-1] for path in flat.paths if path[-1:] == _FROZEN}
    state = set(flat.positions())
    positions = []
    for i, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
        is_code = path[:-1] in frozen or (in_qtensors[i] and path[-1] != "source")
        if i not in state and not is_code and is_kind(leaf):
            positions.append(i)
    return flat, positions


def map_outside_state(function, tree, is_kind):
    """Apply `function` to the arrays of leaves for which `is_kind(leaf)` is true and
    that are neither FP8 state nor codes; all else stays as it is.
    """
    flat, positions = outside_state(tree, is_kind)
    return flat.replace({i: function(jnp.asarray(flat.leaves[i])) for i in positions})


def all_finite(tree: Any) -> jax.Array:
    """Return whether all gradients are free of Inf and NaN.

    Only the gradients of parameters count. FP8 state does not: an amax that was not
    finite is recorded as 0, but the gradients still hold the Inf or NaN that a
    quantizer met.

    The answer is the same on all devices. In `jit` on a mesh it is the answer for the
    whole arrays. Inside `shard_map` it is combined over every mesh axis on which
    gradients differ, pipeline stages included, and with `check_vma=False` over all
    axes. So all devices must call this function.

    Args:
        tree: gradients, in float16 or wider: a variables dict, an NNX state, any tree.

    Returns:
        bool[]; True for a tree without floats.
    """
    return ~jnp.any(_nonfinite(_gradients(tree)))


def select(finite: jax.typing.ArrayLike, new: Tree, old: Tree) -> Tree:
    """Return `new` if `finite`, else `old`, to keep or drop a whole step.

    Pass all arrays that a step changes, so that no part of a skipped step stays:
    parameters, optimizer state and FP8 state together, or a whole TrainState.

    Args:
        finite: bool[].
        new: any tree of arrays.
        old: a tree of the same structure, shapes and dtypes.

    Returns:
        `new` or `old`, to the bit.

    Raises:
        ValueError: the trees differ in structure; or both trees hold the same arrays,
            like two `nnx.state` of one module (use `jaxfp8.nnx.step_if`).
        TypeError: two leaves differ in shape or dtype.
    """

    def choose(new_leaf, old_leaf):
        leaves = map(jnp.asarray, (new_leaf, old_leaf))
        return lax.select(jnp.asarray(finite), *leaves)

    chosen = jax.tree.map(choose, new, old)
    # `nnx.state` gives references: after an in-place step both trees hold the new
    # arrays.
    leaves = jax.tree.leaves(new)
    if leaves and all(map(operator.is_, leaves, jax.tree.leaves(old))):
        raise ValueError(
            "select: old: expected the arrays from before the step, got those of new; "
            "nnx.state is no copy, use jaxfp8.nnx.step_if or nnx.as_pure"
        )
    return chosen


def first_nonfinite(tree: Any, order: Any = None) -> str | None:
    """Return the path of the first gradient that holds an Inf or NaN, or None; outside
    of `jit`.

    A NaN that arises in the backward of one layer reaches the gradients of all layers
    before that layer, and no layer after it. So look at the layer nearest to the loss,
    and pass `order` to find that layer: without `order` the answer is the first leaf in
    the tree.

    Args:
        tree: gradients: a variables dict, an NNX state, any tree. FP8 state in the tree
            does not count.
        order: parts of paths that name layers, in the order of the forward pass:
            `["embed", "layers/0", "layers/1", "head"]`. Of several layers with an Inf
            or NaN the last one is named, which the backward pass meets first; leaves of
            no layer in `order` come last. None keeps the order of the tree, which for
            dicts is alphabetical and not that of the model.

    Raises:
        ValueError: `order` names a layer that the tree does not have.
    """
    gradients = _gradients(tree)
    names = [name for name, _ in gradients]
    depths = dict.fromkeys(names, -1)
    for depth, layer in enumerate(order or ()):
        # The parts of a layer are side by side in a path: `Dense_0` in
        # `params/Dense_0/kernel`.
        parts = f"/{layer.strip('/')}/"
        below = [name for name in names if parts in f"/{name}/"]
        if not below:
            raise ValueError(
                f"first_nonfinite: order: expected the names of layers in {names}, got "
                f"{layer!r}"
            )
        depths |= dict.fromkeys(below, depth)
    bad = itertools.compress(names, np.asarray(_nonfinite(gradients)))
    return max(bad, key=depths.get, default=None)


def _nonfinite(gradients):
    """Return bool[n]: for each gradient, whether it holds an Inf or NaN on any
    device.
    """
    # One flag for each leaf, combined over the devices in one reduction.
    bad = jnp.array([~jnp.all(jnp.isfinite(leaf)) for _, leaf in gradients], bool)
    # The axes of a `shard_map` over which flags differ: with check_vma=False any.
    axes = jax.sharding.get_abstract_mesh().manual_axes
    if axes and _mesh.varying(lax.axis_index(axes[0])):
        axes = [axis for axis in axes if axis in _mesh.varying(bad)]
    return lax.pmax(bad.astype(jnp.int32), tuple(axes)) > 0 if axes else bad


def _gradients(tree) -> list[tuple[str, Any]]:
    """Return the paths and values of the float leaves that are not state."""
    flat, positions = outside_state(tree, is_inexact)
    return [(flat.name(i), flat.leaves[i]) for i in positions]
