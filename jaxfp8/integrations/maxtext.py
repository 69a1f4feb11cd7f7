"""MaxText: `quantization=fp8` with the products of this library in place of Flax's, and with gradient accumulation.

    from jaxfp8.integrations import maxtext

    maxtext.install()  # then train as ever; or: python -m jaxfp8.integrations.maxtext base.yml quantization=fp8 ...

This module was written after MaxText 0.2.5, whose FP8 is two methods of `layers/quantizations.py`, and tried with it.
`install` first looks up whatever it changes: it refuses a MaxText that lacks any of it, and leaves it as it was.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn, nnx

from ..linen import Fp8DotGeneral, Fp8Einsum
from ..nnx import OverwriteWithGradient, trainable, value_and_grad
from ..recipes import OVERWRITE_WITH_GRADIENT, DelayedScaling, Recipe, _state_tree, checked
from ..train import accumulate_gradients, update_state

__all__ = ["Fp8DirectDotGeneralOp", "install"]

_TRIED = "0.2.5"
_QUANTIZATIONS = "maxtext.layers.quantizations"
_ACCUMULATION = "maxtext.utils.gradient_accumulation"
_CONFIG = "maxtext.configs.pyconfig"
_CHECKS = "maxtext.utils.train_utils"
_ACCUMULATE = "gradient_accumulation_loss_and_grad"
_VALIDATOR = "set_derived_and_validate_values"
_HOOKS = {
    _QUANTIZATIONS: ("Fp8Quantization.dot_general_cls", "Fp8Quantization.einsum"),
    _ACCUMULATION: (_ACCUMULATE, "nnx.value_and_grad"),
    _CONFIG: ("_initialize_pydantic", f"types.MaxTextConfig.{_VALIDATOR}"),
    _CHECKS: ("validate_train_config",),
}

_installed = contextlib.ExitStack()


def install(recipe: Recipe | None = None) -> contextlib.ExitStack:
    """Give MaxText's `quantization=fp8` the products of this library, for models that are made from now on.

    Dense layers get an `Fp8DotGeneral` and the experts' einsums an `Fp8Einsum`. State is where Flax's classes have it,
    under the same names, so checkpoints of a run with Flax's FP8 go on with ours. `gradient_accumulation_steps` may be
    more than 1: all microbatches of a step run on the same state, whose next value is that of their largest amaxes.

    Args:
        recipe: how operands become FP8; `jaxfp8.DelayedScaling()` without one.

    Returns:
        A context that undoes the call: by `close()`, or at the end of a `with` block. A second call undoes the first.

    Raises:
        ImportError: MaxText is missing, or lacks something that `install` changes; the message names it.
        TypeError: `recipe` is not a Recipe.
    """
    global _installed
    recipe = DelayedScaling() if recipe is None else checked("maxtext.install: recipe", recipe)
    # 1. Look up everything before the first change.
    modules = {name: _module(name) for name in _HOOKS}
    for name, hooks in _HOOKS.items():
        for hook in hooks:
            _require(modules[name], hook)
    # 2. Undo an earlier call, then make all changes or none.
    _installed.close()
    with contextlib.ExitStack() as undo:
        quantization = modules[_QUANTIZATIONS].Fp8Quantization
        _set(undo, quantization, "dot_general_cls", _dot_general_cls(recipe))
        _set(undo, quantization, "einsum", _einsum(recipe))
        accumulate = getattr(modules[_ACCUMULATION], _ACCUMULATE)
        for module in _importers(_ACCUMULATE, accumulate):
            _set(undo, module, _ACCUMULATE, _accumulate_with_state(accumulate, modules[_ACCUMULATION]))
        parse = modules[_CONFIG]._initialize_pydantic
        _set(undo, modules[_CONFIG], "_initialize_pydantic", _parse_with_accumulation(parse, modules[_CONFIG].types))
        check = modules[_CHECKS].validate_train_config
        for module in _importers("validate_train_config", check):
            _set(undo, module, "validate_train_config", _check_with_accumulation(check))
        _installed = undo.pop_all()
    return _installed


def _module(name: str):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"maxtext.install: expected MaxText {_TRIED} or one like it, with a module {name}, but it does not import: "
            f"{error}"
        ) from error


def _require(module, hook: str) -> None:
    attribute = module
    for part in hook.split("."):
        attribute = getattr(attribute, part, None)
    if not callable(attribute):
        try:
            version = importlib.metadata.version("maxtext")
        except importlib.metadata.PackageNotFoundError:
            version = "of an unknown version"
        raise ImportError(
            f"maxtext.install: expected {module.__name__}.{hook}, which MaxText {version} does not have; this was "
            f"written after MaxText {_TRIED}: install that one, or report the version"
        )


def _importers(name: str, value) -> list:
    """Return MaxText's modules that have `value` as their `name`: the defining one, and those that import it."""
    modules = [module for key, module in sys.modules.items() if key.partition(".")[0] == "maxtext"]
    return [module for module in modules if vars(module).get(name) is value]


def _set(undo: contextlib.ExitStack, owner, name: str, value) -> None:
    # `vars` gives what is stored: `getattr` would unwrap a static or class method, and undoing would put that back.
    undo.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


# ------------------------------------------------------------------------------------------------------ products


class Fp8DirectDotGeneralOp(Fp8DotGeneral):
    """An `Fp8DotGeneral` under the name of Flax's class, after which MaxText and its checkpoints name the state."""


class _Fp8Einsum(nn.Module):
    """An einsum with a result in MaxText's compute dtype. Its state is where MaxText has that of Flax's."""

    recipe: Any
    dtype: Any

    @nn.compact
    def __call__(self, eqn, lhs, rhs, **options):
        # Experts that drop tokens multiply with masks, which are bool.
        lhs, rhs = (x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(self.dtype) for x in (lhs, rhs))
        einsum = Fp8Einsum(recipe=self.recipe, name="fp8_einsum")
        return einsum(eqn, lhs, rhs, **{"preferred_element_type": self.dtype} | options)


def _dot_general_cls(recipe):
    def dot_general_cls(self, mesh_axes=()):
        del self, mesh_axes
        return functools.partial(Fp8DirectDotGeneralOp, recipe=recipe)

    return dot_general_cls


def _einsum(recipe):
    def einsum(self, dtype=jnp.float32):
        del self
        return _Fp8Einsum(recipe=recipe, dtype=dtype)

    return einsum


# -------------------------------------------------------------------------------------------------- accumulation


class _NextState(nnx.Variable):
    """The FP8 state of the next step, as far as the microbatches so far tell."""


def _state(tree) -> dict:
    """Return the FP8 state of an NNX model, or of gradients, as a tree of arrays that our functions know."""
    state = tree if isinstance(tree, nnx.State) else nnx.state(tree)
    return {OVERWRITE_WITH_GRADIENT: nnx.to_pure_dict(nnx.filter_state(state, OverwriteWithGradient))}


def _accumulate_with_state(original, module):
    """Wrap MaxText's accumulation, which adds up gradients of parameters, and keep the state beside them."""

    @functools.wraps(original)
    def accumulate(loss_fn, config, model, *args, **options):
        is_nnx = isinstance(model, nnx.Module)
        if not is_nnx and _state_tree.flatten((args, options)).positions():
            raise TypeError(
                "maxtext: model: expected an NNX model for FP8 with gradient accumulation, got a "
                f"{type(model).__name__}: MaxText would add up its state with its gradients; set "
                "gradient_accumulation_steps=1"
            )
        old = _state(model) if is_nnx else {}
        # A model without FP8 state is left to MaxText alone.
        if not jax.tree.leaves(old):
            return original(loss_fn, config, model, *args, **options)
        # MaxText carries all variables that are no parameters from one microbatch to the next.
        model.fp8_next_state = _NextState(jax.tree.map(jnp.zeros_like, old))
        with contextlib.ExitStack() as undo:
            # MaxText's function looks up `nnx` in its module while it is traced, so the change can end with the call.
            _set(undo, module, "nnx", _NnxWithState())
            result = original(loss_fn, config, model, *args, **options)
        new = model.fp8_next_state.get_value()
        del model.fp8_next_state
        _put(model, update_state(old, new))
        return result

    return accumulate


def _put(model, state: dict) -> None:
    variables = nnx.state(model, OverwriteWithGradient)
    nnx.replace_by_pure_dict(variables, state[OVERWRITE_WITH_GRADIENT])
    nnx.update(model, variables)


class _NnxWithState:
    """`flax.nnx` for MaxText's accumulation.

    `value_and_grad` gives the gradients of parameters to MaxText, and those of the state to `model.fp8_next_state`.
    """

    def __getattr__(self, name):
        return getattr(nnx, name)

    @staticmethod
    def value_and_grad(f, *, argnums=0, has_aux=False):
        differentiate = value_and_grad(f, argnums=nnx.DiffState(argnums, trainable), has_aux=has_aux)

        def step(model, *args, **options):
            old = _state(model)
            out, gradients = differentiate(model, *args, **options)
            # Every microbatch reads the state that the step began with.
            _put(model, old)
            model.fp8_next_state.set_value(accumulate_gradients(model.fp8_next_state.get_value(), _state(gradients)))
            # MaxText adds up whatever it is given, so it is given no state.
            return out, nnx.filter_state(gradients, nnx.Param)

        return step


# ---------------------------------------------------------------------------------------------------- its checks


def _parse_with_accumulation(original, types):
    """Wrap MaxText's parser of its configuration, without its refusal of FP8 with gradient accumulation."""

    @functools.wraps(original)
    def parse(argv=None, config_class=types.MaxTextConfig, **options):
        return original(argv, config_class=_accumulating(config_class), **options)

    return parse


@functools.cache
def _accumulating(config_class):
    from pydantic import model_validator

    validate = getattr(config_class, _VALIDATOR)

    def with_accumulation(self):
        quantization = self.quantization
        if quantization != "fp8" or self.gradient_accumulation_steps == 1:
            return validate(self)
        self.quantization = type(quantization)("te_no_quant")  # quantized for all other checks
        try:
            return validate(self)
        finally:
            self.quantization = quantization

    # A validator of the same name takes the place of that of the class it derives from.
    return type(
        config_class.__name__,
        (config_class,),
        {"__module__": config_class.__module__, _VALIDATOR: model_validator(mode="after")(with_accumulation)},
    )


def _check_with_accumulation(original):
    """Wrap MaxText's check of a training configuration, which asserts that FP8 does not accumulate."""

    @functools.wraps(original)
    def check(config):
        return original(_OneStep(config) if config.quantization == "fp8" else config)

    return check


class _OneStep:
    """A configuration that does not accumulate."""

    gradient_accumulation_steps = 1

    def __init__(self, config):
        self._config = config

    def __getattr__(self, name):
        return getattr(self._config, name)


if __name__ == "__main__":
    from absl import app

    from jaxfp8.integrations import maxtext  # this file is `__main__` here, and is not to be there twice

    maxtext.install()
    app.run(_module("maxtext.trainers.pre_train.train").main)
