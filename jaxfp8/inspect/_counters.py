"""Add counters to the state of delayed scaling, or remove them: a quantizer counts where its state has counters."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from .._jax._typing import Tree
from ..recipes import QuantizerState, prefix_of, slot_axis


def with_counters(tree: Tree) -> Tree:
    """Add counters to every quantizer of delayed scaling: f32 `[saturated, flushed, steps]`, of the last step.

        variables = jaxfp8.inspect.with_counters(variables)  # once, before training or in the middle of it

    `saturated` is the fraction of elements with `abs(x * scale) > FP8_MAX` (an Inf counts, a NaN does not), `flushed`
    the fraction of elements that are not zero but have the code of zero, and `steps` the number of steps for which the
    scale has not changed. Counting reads the tensor once more (`ops.count_saturated_and_flushed`), and on a mesh adds
    one reduction over the devices, because fractions are those of the whole tensor. A state that is used several times
    in a step keeps the largest of each counter; a state that is not used keeps its counters. Programs of state without
    counters count nothing, at no cost.

    Counters are called `{input,kernel,output_grad}_counters`, beside the `_amax_history`, and
    `QuantizerState.counters`. They go through gradients, `update_state`, accumulation and checkpoints like the rest of
    the state. Recipes without a history have no counters.

    Args:
        tree: Linen variables or their `_overwrite_with_gradient` collection, a `DotGeneralState`, an NNX state, a
            TrainState, or any tree that holds these; or an NNX module, which is changed in place. Counters in the tree
            stay as they are. The state of an optimizer that was made before mirrors the tree and needs counters too:
            pass an optax state in one tuple with the variables, and an `nnx.Optimizer` by itself. An optimizer that
            accumulates (`optax.MultiSteps`) has to be made anew.

    Returns:
        `tree` with counters f32 `[..., 3]`, zeros, for each scale `[..., 1]`. For a module, the same object.

    Raises:
        ValueError: a history and its scale do not fit.
    """
    return _edited(tree, _add)


def without_counters(tree: Tree) -> Tree:
    """Remove the counters from a tree, the inverse of `with_counters`; an NNX module is changed in place."""
    return _edited(tree, _remove)


def _edited(tree, edit):
    """Return `tree` with `edit(leaves by name)` in place of each node that holds leaves of quantizers by name."""

    def visit(within, node):
        if isinstance(node, QuantizerState):
            fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
            edited = edit({name: value for name, value in fields.items() if value is not None})
            return QuantizerState(**edited)
        if isinstance(node, Mapping):
            edited = edit({name: rest(value, type(node)) for name, value in node.items()})
            # Flax's mappings hold dicts and show them as mappings.
            return edited if type(node) is within else type(node)(edited)
        return node

    def is_holder(node):
        return isinstance(node, (QuantizerState, Mapping))

    def rest(node, within=dict):
        return jax.tree.map(functools.partial(visit, within), node, is_leaf=is_holder)

    # A module or an optimizer of NNX is edited in place; for any other tree a new tree is made.
    return tree if _edit_nodes(tree, edit) else rest(tree)


def _edit_nodes(obj, edit) -> bool:
    """Replace the members of every node of an NNX object by `edit(members by name)`, in place.

    Args:
        obj: an `nnx.Module` or `nnx.Optimizer`; any other object is left alone.
        edit: a function that may add and remove members; the other members are not touched.

    Returns:
        Whether `obj` is an NNX module or optimizer.
    """
    if not isinstance(obj, (nnx.Module, nnx.Optimizer)):
        return False
    for _, node in list(nnx.iter_graph(obj)):
        if isinstance(node, (dict, nnx.State)):
            before, remove, put = dict(node), node.__delitem__, node.__setitem__
        elif isinstance(node, nnx.Module):
            before, remove, put = dict(vars(node)), node.__delattr__, node.__setattr__
        else:
            continue
        after = edit(before)
        for name in before.keys() - after.keys():
            remove(name)
        for name in after.keys() - before.keys():
            put(name, after[name])
    return True


def _prefixes(leaves) -> list[str]:
    prefixes = (prefix_of(name) for name in leaves if isinstance(name, str))
    return [prefix for prefix in prefixes if prefix is not None and f"{prefix}scale" in leaves]


def _add(leaves: dict) -> dict:
    missing = [prefix for prefix in _prefixes(leaves) if f"{prefix}counters" not in leaves]
    pairs = {prefix: (leaves[f"{prefix}amax_history"], leaves[f"{prefix}scale"]) for prefix in missing}
    return leaves | {f"{prefix}counters": _zeros(prefix, *pair) for prefix, pair in pairs.items()}


def _remove(leaves: dict) -> dict:
    counters = {f"{prefix}counters" for prefix in _prefixes(leaves)}
    return {name: value for name, value in leaves.items() if name not in counters}


def _zeros(prefix, history, scale):
    """Make the counters of a quantizer, in the same box and on the same devices as its scale."""
    histories = jax.tree.leaves(history)  # one array; none in the state of an optimizer, where `scale` is empty too

    def beside(leaf):
        axis = slot_axis(f"with_counters: {prefix}scale", histories[0], leaf)
        shape = list(leaf.shape)
        shape[axis] = 3
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=leaf.sharding)
        # Only a committed array was put on its devices on purpose. Other zeros go where JAX puts new arrays.
        is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed
        return jnp.zeros(shape, jnp.float32, device=leaf.sharding if is_placed else None)

    return jax.tree.map(beside, scale)
