"""Calibrate and freeze models for inference: Linen and NNX models, and functions."""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from .._jax._trees import split_arrays
from ..linen import _freeze as linen_freeze
from ..nnx import _freeze as nnx_freeze
from ..recipes import OVERWRITE_WITH_GRADIENT, _state_tree
from ..train import max_grad, update_state

# Variables, and fields of DotGeneralState, of the quantizers that only a backward pass
# runs.
_BACKWARD = ("output_grad", "input_grad", "linear_grad_output", "linear_grad_input")
_BACKWARD += ("wgrad_input", "dgrad_kernel", "wgrad_output_grad")


def calibrate(
    model: nn.Module | nnx.Module | Callable[..., Any],
    *variables_and_batches: Any,
    loss_fn: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Fill amax histories from batches, as training on these batches would, and change
    nothing else.

        variables = jaxfp8.calibrate(model, variables, batches)  # Linen
        jaxfp8.calibrate(model, batches)  # NNX: in place
        # function(variables, *batch)
        variables = jaxfp8.calibrate(function, variables, batches)

    Each batch is one step: histories move by one, and slot 0 is the amax of the whole
    batch, over all devices and all uses of a layer. The amaxes of the last batch act in
    the next forward pass. A quantizer with an empty history has scale 1, so in the
    first batch deeper layers get inputs that were quantized with scale 1: pass a few
    batches.

    Without `loss_fn` the quantizers of inputs and kernels (and of outputs, in a
    `CustomRecipe`) are filled, and no gradient of a parameter is computed. A layer on
    which no result of the model depends, such as a layer behind `stop_gradient`,
    records nothing, as in training.

    Args:
        model: a Linen module, an NNX module, or a function of variables and a batch.
        *variables_and_batches: `variables, batches`; for an NNX module `batches` alone.
            `variables` holds `params`, the state (which a Linen model makes where it is
            missing) and other collections. `batches` is an iterable; each batch is a
            tuple of arguments, or one argument; arguments are pytrees of arrays.
        loss_fn: `loss_fn(variables, *batch) -> f32[]`, for NNX
            `loss_fn(model, *batch)`, which runs in place of the model. With a loss the
            quantizers of gradients are filled too.
        **kwargs: further arguments of the model, such as `deterministic=True`; not
            traced.

    Returns:
        The variables with their next state; all other leaves are the same arrays. For
        NNX `model`.

    Raises:
        TypeError: the arguments do not fit the kind of model, or the model returns no
            floating-point array.
        ValueError: there is no batch, or no state to fill.
    """
    # 1. Check how the arguments fit the kind of model.
    is_nnx = isinstance(model, nnx.Module)
    expected = ["model", "batches"] if is_nnx else ["model", "variables", "batches"]
    arguments = (model, *variables_and_batches)
    if len(arguments) != len(expected):
        got = ", ".join(type(argument).__name__ for argument in arguments)
        raise TypeError(
            f"calibrate: expected calibrate({', '.join(expected)}), got ({got})"
        )
    if loss_fn is not None and kwargs:
        raise TypeError(
            "calibrate: expected no arguments of the model beside loss_fn, got "
            f"{sorted(kwargs)}"
        )
    batches = _checked_batches(variables_and_batches[-1])
    # 2. Reduce every kind of model to a function of variables and a batch.
    variables = variables_and_batches[0]
    apply = model.apply if isinstance(model, nn.Module) else model
    if is_nnx:
        graph, variables = nnx.split(model)
        apply = operator.call

    def function(variables, *batch):
        if is_nnx:
            variables = nnx.merge(graph, variables, copy=True)
        if loss_fn is not None:
            return loss_fn(variables, *batch)
        return _total(apply(variables, *batch, **kwargs))

    # 3. Let a Linen model make the state that it lacks, from the shapes of the first
    #    batch.
    if isinstance(model, nn.Module) and OVERWRITE_WITH_GRADIENT not in variables:
        first = next(batches)

        @jax.jit
        def first_state(variables, *batch):
            options = kwargs | {"mutable": [OVERWRITE_WITH_GRADIENT]}
            return apply(variables, *batch, **options)[1]

        variables = {**variables, **first_state(variables, *first)}
        batches = itertools.chain([first], batches)
    filled = _filled(function, variables, batches, loss_fn is not None)
    if not is_nnx:
        return filled
    nnx.update(model, filled)
    return model


def _checked_batches(batches) -> Iterator[tuple]:
    """Return an iterator over the arguments of each batch, at least one."""
    if hasattr(batches, "shape"):
        raise TypeError(
            "calibrate: batches: expected an iterable of batches, got an array of "
            f"shape {tuple(batches.shape)}, whose rows would be the batches; for one "
            "batch pass [x]"
        )
    # A NamedTuple is one argument, a pytree with names; only a plain tuple is a tuple
    # of arguments.
    batches = (batch if type(batch) is tuple else (batch,) for batch in batches)
    for first in batches:
        return itertools.chain([first], batches)
    raise ValueError(
        "calibrate: batches: expected at least one batch, got none; an iterator can "
        "be read only once"
    )


def _filled(function, variables, batches, is_loss: bool):
    """Return `variables` after a step of `function`, which returns a number, for each
    batch; `is_loss` says that `function` is a `loss_fn`.
    """
    where = _state_tree.flatten(variables)
    positions = where.positions()
    if not is_loss:
        positions = [i for i in positions if not _is_of_backward(where.paths[i])]
    if not positions:
        raise ValueError(
            "calibrate: variables: expected state of quantizers, found none: recipes "
            "other than delayed scaling keep no state and need no calibration; frozen "
            "models have fixed scales"
        )

    @jax.jit
    def next_state(variables, batch):
        flat = _state_tree.flatten(variables)

        # The cotangent of the state is its next value, whatever the gradient of the
        # outputs.
        def total(state):
            return function(max_grad(flat.replace(state)), *batch)

        return jax.grad(total)({i: flat.leaves[i] for i in positions})

    for batch in batches:
        old = _state_tree.flatten(variables)
        # A quantizer that is absent keeps its state.
        absent = dict.fromkeys(old.positions())
        new = old.replace(absent | next_state(variables, batch))
        variables = update_state(variables, new)
    return variables


def _is_of_backward(path) -> bool:
    """Tell whether a leaf belongs to a quantizer of the backward, by its name or a
    field above it in its path.
    """
    return any(name in path or path[-1].startswith(f"{name}_") for name in _BACKWARD)


def _total(outputs):
    """Return a number that depends on every result of the model, whose value does not
    matter.
    """
    arrays, _ = split_arrays(outputs)
    leaves = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not leaves:
        raise TypeError(
            "calibrate: model: expected a result with floating-point arrays, got "
            "none; register the class of the result as a pytree, or pass loss_fn"
        )
    return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves), jnp.float32(0))


def freeze(model: nn.Module | nnx.Module, *args: Any, **kwargs: Any) -> Any:
    """Freeze a model for inference: kernels become FP8 codes and inputs get fixed
    scales, with the values of training.

        frozen = jaxfp8.freeze(model, variables, x)  # Linen: model.apply(frozen, x)
        jaxfp8.freeze(model, x)  # NNX: in place

    The code of the model does not change. The arguments after model and variables are
    an example of a call, which is traced to find the operands of each product.

    - The kernel of each FP8 product becomes codes, a byte each, with the contracting
      dimensions last, as GEMMs read them, and scales. Codes and scales are parameters
      of the product; a placeholder without an array replaces the kernel.
    - With delayed scaling the input keeps the scale that its history gives now, and all
      histories are dropped. Inputs of other recipes are scaled when they arrive, as
      before.
    - Products in high precision keep their kernels. In Linen a kernel also stays if
      anything but FP8 products reads it; in NNX such a reader gets NaN.
    - A frozen model does not train: the gradient of a frozen kernel raises. Gradients
      of inputs and of other parameters are as before.

    Products that the example does not reach stay as they are, and in Linen those whose
    kernel depends on the input. The `min_size` of a recipe is applied to the sizes of
    the example, once.

    Args:
        model: a Linen or an NNX module.
        *args: for a Linen model its variables, then the arguments of `model.apply`; for
            an NNX model its arguments. Arrays or `jax.ShapeDtypeStruct`; other values
            are static.
        **kwargs: keyword arguments of that call; for a Linen model also `method`,
            `rngs` and `mutable`.

    Returns:
        The frozen variables; for NNX `model`, changed in place. `jax.eval_shape` of
        this function gives the target for restoring a checkpoint.

    Raises:
        TypeError: `model` is neither a Linen nor an NNX module; a Linen model comes
            without variables, or has products in branches of `nn.cond`.
        ValueError: there is no product to freeze; a product has an empty history, or a
            custom quantizer with state; a Linen product is called with several kernels;
            an NNX layer computes its kernel, or other code calls a product that several
            NNX layers share.
    """
    if isinstance(model, nn.Module):
        if not args:
            raise TypeError(
                "freeze: expected freeze(model, variables, *args) for a Linen model, "
                "got no variables"
            )
        variables, *args = args
        return linen_freeze.freeze(model, variables, args, kwargs)
    if isinstance(model, nnx.Module):
        return nnx_freeze.freeze(model, args, kwargs)
    raise TypeError(
        "freeze: model: expected a Linen or an NNX module, got "
        f"{type(model).__name__}; in plain functions jaxfp8.quantize_params gives the "
        "codes of kernels"
    )
