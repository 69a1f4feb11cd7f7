"""quantize_params: quantize kernels once a step, for every microbatch, remat and pipeline tick that uses them."""

import dataclasses
from typing import Any

import jax

from ..dot import shared
from ..recipes import AmaxReduction, OperandOptions, QuantizerState, _state_tree, checked, read_states


def quantize_params(params: Any, state: Any, recipe: Any) -> Any:
    """Quantize the kernels of `params` once: `dot_general` and our layers take the codes as they are.

    A kernel that is used by several microbatches, again in a rematerialized block, or in every tick of a pipeline, is
    quantized once. The gradient still arrives for the kernel in its own dtype, and the next state at the state:

        def loss(variables, microbatches):
            params = jaxfp8.quantize_params(variables["params"], variables["_overwrite_with_gradient"], recipe)
            ...  # a scan over microbatches, with params and state

    Differentiate with respect to the parameters, as here, or with respect to what this returns: that gradient is a tree
    of QTensors in which `source` is the gradient of the kernel.

    Args:
        params: a pytree of parameters.
        state: the state of the products that use them: a `_overwrite_with_gradient` collection, a tree of
            `DotGeneralState` with the structure of params, or a module that holds both.
        recipe: of these products.

    Returns:
        `params` with a QTensor for each kernel that has state: codes `[..., k, n]`, for a matrix also `[n, k]`, and
        `source`, the kernel. The kernel of a state at `path` is the leaf `path`, `path/kernel`, or the `kernel` beside
        it; kernels that no state belongs to stay as they are.

    Raises:
        ValueError: no state belongs to a kernel of `params`; a state does not fit the recipe, or the recipe keeps none.
    """
    tree, states = _state_tree.flatten(params), _state_tree.flatten(state)
    where = {path: i for i, path in enumerate(tree.paths)}
    quantizer, reduce = checked("quantize_params: recipe", recipe).quantizers()[1], AmaxReduction.for_recipe(recipe)
    if not isinstance(quantizer.init(), QuantizerState):
        raise ValueError(
            f"quantize_params: recipe: expected DelayedScaling, got {recipe!r}, which keeps no state that says which "
            "parameters are kernels; its products quantize their kernels themselves"
        )
    # Quantize the kernel of each state; leave parameters that no state belongs to.
    values = {}
    for pair in states.quantizers:
        position = next((where[path] for path in _kernel_paths(states.paths[pair.amax_history]) if path in where), None)
        if position is None:
            continue
        old = QuantizerState(*(states.leaves[i] for i in pair.positions()))
        quantizer.check_state(f"quantize_params: state: {pair.name}", old)
        kernel = tree.leaves[position]
        # Codes have no derivative: the gradient of the product goes to `source`, the next state to the product's state.
        x, old = jax.lax.stop_gradient((kernel, shared(old)))
        (step,) = read_states([quantizer], [old])
        options = OperandOptions(cols=x.ndim - 1, columnwise=x.ndim == 2, reduce=reduce)
        q, _ = quantizer.quantize_operand(x, step, options)
        values[position] = dataclasses.replace(q, source=kernel)
    if not values:
        raise ValueError(
            "quantize_params: state: expected the state of kernels in params, found none that belongs to one; pass the "
            "`_overwrite_with_gradient` collection, or a tree of DotGeneralState with the structure of params"
        )
    return tree.replace(values)


def _kernel_paths(history_path):
    """Yield the paths where the kernel of a history may be, best first; nothing for other quantizers."""
    *parent, leaf = history_path
    if leaf == "amax_history":  # a field of a QuantizerState
        if not parent or parent.pop() != "kernel":
            return
    elif leaf != "kernel_amax_history":
        return
    yield tuple(parent)
    yield (*parent, "kernel")
    yield (*parent[:-1], "kernel")
