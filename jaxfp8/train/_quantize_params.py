"""quantize_params: quantize kernels once a step, for every microbatch, remat and
pipeline tick that uses them.
"""

import dataclasses
import re
from typing import Any

import jax

from .._jax import _mesh
from .._jax._primitives import without_numpy
from ..recipes import (
    AmaxReduction,
    OperandOptions,
    QuantizerState,
    _state_tree,
    checked,
    shared,
    some,
)


def quantize_params(
    params: Any, state: Any, recipe: Any, where: str | None = None
) -> Any:
    """Quantize the kernels of `params` once; `dot_general`, `ragged_dot` and the layers
    of jaxfp8 reuse the codes.

    A kernel that is used by several microbatches, again in a rematerialized block, or
    in every tick of a pipeline, is quantized once. The gradient still belongs to the
    kernel, in its own dtype, and the cotangent of the state is still the next state:

        def loss(variables, microbatches):
            params, state = variables["params"], variables["_overwrite_with_gradient"]
            params = jaxfp8.quantize_params(params, state, recipe)
            ...  # a scan over microbatches, with params and state

    With a recipe that keeps no state, `where` says which parameters are kernels:

        params = jaxfp8.quantize_params(
            params, None, Float8BlockScaling(), where=".*/(up|down)"
        )

    Each leaf has one scale, or a scale for each of its blocks. A leaf that stacks the
    kernels of several layers needs a scale for each layer: `vmap` the call.

    Differentiate with respect to the parameters, as in the first example, or with
    respect to the result: that gradient is a tree of QTensors in which `source` is the
    gradient of the kernel.

    Args:
        params: a pytree of parameters.
        state: the state of the products that use the kernels: a
            `_overwrite_with_gradient` collection, a tree of `DotGeneralState` with the
            structure of params, or a module that holds parameters and state. None where
            the recipe keeps no state; delayed scaling then takes the scale of each
            kernel from its current amax.
        recipe: the recipe of these products.
        where: a regex for `re.fullmatch` on the path of a kernel in params, its parts
            joined by `/`. With state `where` may be None: the kernels are then the
            parameters that state belongs to.

    Returns:
        `params` with a QTensor for each kernel: codes `[..., k, n]`, for a matrix and
        for blocks also `[..., n, k]`, and `source`, the kernel. The kernel of a state
        at `path` is the leaf `path`, `path/kernel`, or the `kernel` beside it; other
        parameters stay as they are. With a scale for each block, the dimensions before
        the last two count matrices, as the experts of `ragged_dot`.

    Raises:
        TypeError: `recipe` is not a Recipe, or keeps no state, and `state` has some.
        ValueError: no kernel of `params` matches `where`, or none has state; a state
            does not fit the recipe; `state` and `where` are both None; the recipe keeps
            kernels in high precision.
    """
    tree = _state_tree.flatten(params)
    recipe = checked("quantize_params: recipe", recipe)
    quantizer = recipe.quantizers().kernel
    reduce = AmaxReduction.for_recipe(recipe)
    if not quantizer.has_one_scale and quantizer.block is None:
        raise ValueError(
            "quantize_params: recipe: expected kernels in FP8 with one scale, or one "
            f"for each block, got {recipe!r}"
        )
    # 1. Find the kernels, and the state of each.
    if state is not None:
        states = _states_of_kernels(tree, state, quantizer)
    elif where is not None:
        states = dict.fromkeys(range(len(tree.leaves)))
    else:
        raise ValueError(
            "quantize_params: where: without a state nothing says which parameters "
            "are kernels; pass a regex of their paths, for example "
            'where=".*/kernel"'
        )
    # 2. Quantize those that `where` names; other parameters stay.
    quantized = {}
    for i, old in states.items():
        if where is None or re.fullmatch(where, tree.name(i)):
            quantized[i] = _quantized(quantizer, tree.leaves[i], old, reduce)
    if not quantized:
        raise ValueError(
            f"quantize_params: where: no kernel matches {where!r} as a whole; paths "
            f"are {some(list(map(tree.name, states)))}"
        )
    return tree.replace(quantized)


def _quantized(quantizer, kernel, state, reduce):
    """Return the QTensor of a kernel, with its source."""
    # Codes have no derivative: the gradient of the product goes to `source`, the next
    # state to the product's state.
    kernel = _mesh.without_reduced(without_numpy(kernel))
    x, state = jax.lax.stop_gradient((kernel, shared(state)))
    scale = None if state is None else quantizer.scale_from(state)
    # One scale holds for the whole kernel, whose columns may be several dimensions;
    # blocks lie in matrices.
    options = OperandOptions(reduce=reduce)
    if quantizer.has_one_scale:
        options = options._replace(cols=x.ndim - 1, columnwise=x.ndim == 2)
    q, _ = quantizer.quantize_operand(x, scale, options)
    return dataclasses.replace(q, source=kernel)


def _states_of_kernels(tree, state, quantizer) -> dict[int, QuantizerState]:
    """Return the state of each kernel in the tree that has one, by position."""
    states = _state_tree.flatten(state)
    positions = {tree.name(i): i for i in range(len(tree.leaves))}
    kernels = {}
    for pair in states.quantizers:
        product, _, operand = pair.name.rpartition("/")
        beside = (*product.split("/")[:-1], "kernel")
        for path in (product, pair.name, "/".join(beside)):
            if operand == "kernel" and path in positions:
                old = QuantizerState(*pair.leaves)
                quantizer.check_state(f"quantize_params: state: {pair.name}", old)
                kernels[positions[path]] = old
                break
    if not kernels:
        raise ValueError(
            "quantize_params: state: expected the state of kernels in params, found "
            "no state of a kernel; pass the `_overwrite_with_gradient` collection, or "
            "a tree of DotGeneralState with the structure of params"
        )
    return kernels
