"""MaxText's gradient accumulation with FP8 state: all microbatches of a step run on one
state, and combine by max.

MaxText itself adds up gradients of parameters, and carries all other variables from one
microbatch to the next.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ..nnx import OverwriteWithGradient, trainable, value_and_grad
from ..recipes import OVERWRITE_WITH_GRADIENT, _state_tree
from ..train import accumulate_gradients, update_state
from ._maxtext_experts import With


class _NextState(nnx.Variable):
    """The FP8 state of the next step, combined over the microbatches so far."""


def _state(tree) -> dict:
    """Return the FP8 state of an NNX model, or of gradients, as a state collection of
    arrays.
    """
    state = nnx.state(tree, OverwriteWithGradient)
    return {OVERWRITE_WITH_GRADIENT: nnx.to_pure_dict(state)}


def accumulate_with_state(module, original):
    """Wrap MaxText's accumulation, which adds up gradients of parameters, and keep the
    state beside them.
    """

    def accumulate(loss_fn, config, model, *args, **options):
        is_nnx = isinstance(model, nnx.Module)
        if not is_nnx and _state_tree.flatten((args, options)).positions():
            raise TypeError(
                "maxtext: model: expected an NNX model for FP8 with gradient "
                f"accumulation, got a {type(model).__name__}: MaxText would add up "
                "its state like gradients; set gradient_accumulation_steps=1"
            )
        old = _state(model) if is_nnx else {}
        # A model without FP8 state is left to MaxText alone.
        if not jax.tree.leaves(old):
            return original(loss_fn, config, model, *args, **options)
        model.fp8_next_state = _NextState(jax.tree.map(jnp.zeros_like, old))
        # MaxText's function looks up `nnx` in its module while it is traced, so the
        # change can end with the call.
        module.nnx = With(nnx, value_and_grad=_value_and_grad)
        try:
            result = original(loss_fn, config, model, *args, **options)
        finally:
            module.nnx = nnx
        new = model.fp8_next_state.get_value()
        del model.fp8_next_state
        nnx.update(model, update_state(old, new)[OVERWRITE_WITH_GRADIENT])
        return result

    return accumulate


def _value_and_grad(f, *, argnums=0, has_aux=False):
    """Differentiate as `nnx.value_and_grad` in MaxText's accumulation: the gradients of
    parameters are MaxText's, those of the state go to `model.fp8_next_state`.
    """
    differentiate = value_and_grad(
        f, argnums=nnx.DiffState(argnums, trainable), has_aux=has_aux
    )

    def step(model, *args, **options):
        old = _state(model)
        out, gradients = differentiate(model, *args, **options)
        # Every microbatch reads the state that the step began with.
        nnx.update(model, old[OVERWRITE_WITH_GRADIENT])
        so_far = model.fp8_next_state.get_value()
        new = accumulate_gradients(so_far, _state(gradients))
        model.fp8_next_state.set_value(new)
        # MaxText adds up all gradients that it gets, so it gets those of parameters
        # only.
        return out, nnx.filter_state(gradients, nnx.Param)

    return step
