"""Counters beside the state of delayed scaling: asked for by being there, in any tree that holds state."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from .._jax._typing import Tree
from ..nnx._modules import edit_nodes
from ..recipes import QuantizerState, prefix_of, slot_axis


def with_counters(tree: Tree) -> Tree:
    """Adds counters to every quantizer of delayed scaling: f32 `[saturated, flushed, steps]`, of the last step.

        variables = jaxfp8.inspect.with_counters(variables)  # once, before training or in the middle of it

    `saturated` is the fraction of elements with `abs(x * scale) > FP8_MAX` (an Inf is one, a NaN is none), `flushed`
    that of elements which are not zero and whose code is. Counting reads the tensor once more
    (`ops.count_saturated_and_flushed`); where there are no counters nothing is counted, and programs are as if they did
    not exist. `steps` is for how many steps the scale has not changed. A state that is used several times in a step
    keeps the largest of each; one that is not used keeps what it has. On a mesh fractions are of the whole tensor, for
    one more reduction over the devices.

    They are called `{input,kernel,output_grad}_counters` beside the `_amax_history`, and `QuantizerState.counters`.
    They go through gradients, `update_state`, accumulation and checkpoints as the rest of the state. Recipes that keep
    no history have none.

    Args:
        tree: Linen variables or their `_overwrite_with_gradient` collection, a `DotGeneralState`, an NNX state, a
            TrainState, or any tree that holds these; or an NNX module, which is changed in place. Counters that are
            there stay. An optimizer that was made before has a tree of the same form: give it too, the state of
            optax in one tuple with the variables, an `nnx.Optimizer` by itself. One that accumulates
            (`optax.MultiSteps`) has to be made anew.

    Returns:
        The tree with them, zeros at first: `[..., 3]` for a scale `[..., 1]`. The same object for a module.

    Raises:
        ValueError: a history and its scale do not fit.
    """
    return _edited(tree, _add)


def without_counters(tree: Tree) -> Tree:
    """The tree without counters; the argument is as of `with_counters`."""
    return _edited(tree, _remove)


def _edited(tree, edit):
    """`tree` with `edit(leaves by name)` in place of what holds the leaves of quantizers by their names."""

    def visit(within, node):
        if isinstance(node, QuantizerState):
            fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
            edited = edit({name: value for name, value in fields.items() if value is not None})
            return QuantizerState(**edited)
        if isinstance(node, Mapping):
            members = edit({name: rest(value, type(node)) for name, value in node.items()})
            # Flax's mappings hold dicts and show them as mappings.
            return members if type(node) is within else type(node)(members)
        return node

    def rest(node, within=dict):
        return jax.tree.map(functools.partial(visit, within), node, is_leaf=_names_leaves)

    return tree if edit_nodes(tree, edit) else rest(tree)


def _names_leaves(node) -> bool:
    return isinstance(node, (QuantizerState, Mapping))


def _prefixes(leaves) -> list[str]:
    found = (prefix_of(name) for name in leaves if isinstance(name, str))
    return [prefix for prefix in found if prefix is not None and f"{prefix}scale" in leaves]


def _add(leaves: dict) -> dict:
    without = (prefix for prefix in _prefixes(leaves) if f"{prefix}counters" not in leaves)
    return leaves | {
        f"{prefix}counters": _zeros(prefix, leaves[f"{prefix}amax_history"], leaves[f"{prefix}scale"])
        for prefix in without
    }


def _remove(leaves: dict) -> dict:
    gone = {f"{prefix}counters" for prefix in _prefixes(leaves)}
    return {name: value for name, value in leaves.items() if name not in gone}


def _zeros(prefix, history, scale):
    """Counters of a quantizer, held and placed as its scale is: by a variable, a box, or neither."""
    of_history = jax.tree.leaves(history)  # one array; none in an optimizer, which keeps nothing for state

    def beside(leaf):
        axis = slot_axis(of_history[0].shape, leaf.shape)
        if axis is None:
            raise ValueError(
                f"with_counters: {prefix}scale: expected a scale (..., 1) beside a history (..., H), got shapes "
                f"{leaf.shape} and {of_history[0].shape}"
            )
        shape = list(leaf.shape)
        shape[axis] = 3
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=leaf.sharding)
        is_placed = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.committed
        return jnp.zeros(shape, jnp.float32, device=leaf.sharding if is_placed else None)

    return jax.tree.map(beside, scale)
