"""MaxText: run its flags of FP8 with the products of jaxfp8, also under gradient
accumulation.

    from jaxfp8.integrations import maxtext

    maxtext.install()  # then train as before; or:
    # python -m jaxfp8.integrations.maxtext base.yml quantization=fp8 ...

This module was written after MaxText 0.2.5, which makes all products from one object of
`layers/quantizations.py`, but for grouped products of experts, which are calls of
`megablox.gmm`. `install` first looks up all attributes that it changes. It refuses a
MaxText that lacks one of them, and changes nothing then.
"""

import contextlib
import dataclasses
import functools
import pkgutil
import re
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..dot import checkpoint_policies, ragged_dot
from ..linen import Fp8DotGeneral, Fp8Einsum
from ..nnx import max_grad
from ..recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    StaticScaling,
    checked,
    keeps_state,
)
from ._maxtext_accumulation import accumulate_with_state
from ._maxtext_experts import STAGES, With, next_state, share_among_devices

__all__ = ["Fp8DirectDotGeneralOp", "install"]

# MaxText has no name for block scaling: `_config_class` adds this one.
_BLOCK = "te_fp8_blockscaling"
_CURRENT = "te_fp8_currentscaling"
_RECIPES: dict[str, Recipe] = {
    "fp8": DelayedScaling(),
    "te_fp8_delayedscaling": DelayedScaling(),
    _CURRENT: Float8CurrentScaling(),
    _BLOCK: Float8BlockScaling(),
    "te_mxfp8": MXFP8BlockScaling(),
}
# MaxText's flags of calibration, by the option of StaticScaling for the same operand.
_CALIBRATIONS = {
    "input": "act_quantization_calibration_method",
    "kernel": "weight_quantization_calibration_method",
    "output_grad": "bwd_quantization_calibration_method",
}
_TRIED = "0.2.5"
_TRAIN = "maxtext.trainers.pre_train.train"

_installed = contextlib.ExitStack()


def install(recipe: Recipe | None = None) -> contextlib.ExitStack:
    """Give MaxText's flags of FP8 the products of jaxfp8, in models that are made after
    this call.

    | `quantization=` | recipe |
    |---|---|
    | `fp8`, `te_fp8_delayedscaling` | `DelayedScaling()` |
    | `te_fp8_currentscaling` | `Float8CurrentScaling()` |
    | `te_fp8_blockscaling`, a name that MaxText itself lacks | `Float8BlockScaling()` |
    | `te_mxfp8` | `MXFP8BlockScaling()` |

    Under `te_fp8_currentscaling` MaxText's `act_quantization_calibration_method`,
    `weight_…` and `bwd_…` count too: with `fixed,-224,224` the operand has the constant
    scale of that bound, see `StaticScaling`; with `absmax`, their default, it has the
    scale of its own amax.

    TransformerEngine need not be installed. Dense layers get an `Fp8DotGeneral`, the
    experts' einsums an `Fp8Einsum`, and their grouped products (`sparse_matmul=true`,
    whatever `megablox` is) are `jaxfp8.ragged_dot` with the einsums' state. State has
    the names and places that Flax's classes give it under `fp8`, so a run can go on
    with checkpoints of Flax's FP8. `gradient_accumulation_steps` may be more than 1:
    all microbatches of a step run on the same state, and their next states combine by
    max. In the loss all uses of one state combine by max too, as under
    `jaxfp8.value_and_grad`. `remat_policy=minimal_with_quantization` keeps FP8 codes.

    Args:
        recipe: how operands become FP8 under every one of the flags, in place of the
            table; None is the table.

    Returns:
        A context that undoes the call: by `close()`, or at the end of a `with` block. A
        second `install` undoes the first before it makes its own changes.

    Raises:
        ImportError: MaxText is missing, or lacks something that `install` changes; the
            message names it.
        TypeError: `recipe` is not a Recipe.

    A model that is made later raises a ValueError for another calibration method than
    these two. Experts with `sparse_matmul=true` raise one for flags that change the
    grouped products: `use_tokamax_gmm`, `num_moe_emb_chunks`,
    `moe_quantize_token_all_gather`, kernels that are quantized, and `use_ragged_sort`
    where rows of other devices' experts come first. With a recipe that keeps state they
    raise one for pipelines and DiLoCo too.
    """
    global _installed
    recipes = _RECIPES
    if recipe is not None:
        recipes = dict.fromkeys(_RECIPES, checked("maxtext.install: recipe", recipe))
    # What changes the first of these attributes of MaxText's modules, and all that it
    # needs there.
    hooks = {
        "maxtext.layers.quantizations": (
            functools.partial(_configure, recipes=recipes),
            "configure_quantization",
            "Fp8Quantization",
        ),
        "maxtext.kernels.megablox": (_grouped, "gmm"),
        "maxtext.layers.moe": (
            share_among_devices,
            "RoutedMoE.sparse_matmul",
            "jax.shard_map",
        ),
        "maxtext.layers.nnx_decoders": (_keep_codes, "NNXDecoder.minimal_policy"),
        "maxtext.utils.gradient_accumulation": (
            accumulate_with_state,
            "gradient_accumulation_loss_and_grad",
            "nnx.value_and_grad",
        ),
        "maxtext.configs.pyconfig": (
            _parse,
            "_initialize_pydantic",
            "types.MaxTextConfig.set_derived_and_validate_values",
        ),
        "maxtext.utils.train_utils": (_check, "validate_train_config"),
        _TRAIN: (_share_state, "loss_fn"),
    }
    # 1. Look up everything before the first change.
    for module, (_, *needed) in hooks.items():
        for hook in needed:
            _owner(module, hook)
    # 2. Undo an earlier call, then make all changes or none.
    _installed.close()
    with contextlib.ExitStack() as undo:
        for module, (wrap, hook, *_) in hooks.items():
            owner, name = _owner(module, hook)
            original = getattr(owner, name)
            for importer in _importers(name, original) or [owner]:
                changed = wrap(sys.modules[module], original)
                new = functools.wraps(original)(changed)
                # `vars` gives the stored object: `getattr` would unwrap a static or
                # class method, and undoing would store that.
                undo.callback(setattr, importer, name, vars(importer)[name])
                setattr(importer, name, new)
        _installed = undo.pop_all()
    return _installed


def _owner(module: str, hook: str) -> tuple[Any, str]:
    """Return the object of a module of MaxText that has a hook, and the name of the
    hook in it.

    Raises:
        ImportError: the module does not import, or lacks the hook.
    """
    path, _, name = hook.rpartition(".")
    try:
        owner = pkgutil.resolve_name(f"{module}:{path}")
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"maxtext.install: expected {module}.{hook}, which MaxText as installed "
            f"does not have ({error}); this was written after MaxText {_TRIED}: "
            "install that one, or report the version"
        ) from error
    return owner, name


def _importers(name: str, value) -> list:
    """Return MaxText's modules that have `value` as their `name`: the defining one, and
    those that import it.
    """
    return [
        module
        for key, module in sys.modules.items()
        if key.partition(".")[0] == "maxtext" and vars(module).get(name) is value
    ]


# ----------------------------------------------------------------------------- products


class Fp8DirectDotGeneralOp(Fp8DotGeneral):
    """`Fp8DotGeneral` under the name of Flax's class, by which MaxText and its
    checkpoints name the state.
    """


class _Fp8Einsum(nn.Module):
    """An einsum with a result in MaxText's compute dtype, whose state has the path of
    Flax's einsum in MaxText.
    """

    recipe: Any
    dtype: Any

    @nn.compact
    def __call__(self, eqn, lhs, rhs, **options):
        # Experts that drop tokens multiply with masks, which are bool.
        lhs, rhs = (
            x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(self.dtype)
            for x in (lhs, rhs)
        )
        einsum = Fp8Einsum(recipe=self.recipe, name="fp8_einsum")
        options.setdefault("preferred_element_type", self.dtype)
        return einsum(eqn, lhs, rhs, **options)


def _configure(module, original, recipes):
    """Wrap MaxText's choice of a quantization: all flags in `recipes` get jaxfp8's
    where `fp8` would get Flax's.
    """

    @dataclasses.dataclass
    # MaxText's experts check for this class: its einsums keep state
    class Quantization(module.Fp8Quantization):
        recipe: Any

        @property
        def quantize_dtype(self):
            # MaxText's experts give it to `megablox.gmm`, see `_grouped`.
            return self.recipe

        def dot_general_cls(self, mesh_axes=()):
            del mesh_axes
            return functools.partial(Fp8DirectDotGeneralOp, recipe=self.recipe)

        def einsum(self, dtype=jnp.float32):
            return _Fp8Einsum(recipe=self.recipe, dtype=dtype)

    def configure(config, *args, **options):
        recipe = recipes.get(config.quantization)
        if recipe is None:
            return original(config, *args, **options)
        if recipes is _RECIPES and config.quantization == _CURRENT:
            recipe = _calibrated(config)
        quantization = original(With(config, quantization="fp8"), *args, **options)
        if not isinstance(quantization, module.Fp8Quantization):
            return quantization
        return Quantization(recipe)

    return configure


def _calibrated(config) -> Recipe:
    """Return current scaling, with constant scales for the operands that MaxText's
    flags give a fixed range.
    """
    bounds = {}
    for option, flag in _CALIBRATIONS.items():
        bounds[option] = _bound(flag, getattr(config, flag, "absmax"))
    is_fixed = set(bounds.values()) != {None}
    return StaticScaling(**bounds) if is_fixed else _RECIPES[_CURRENT]


def _bound(flag: str, method: str) -> float | None:
    """Return the bound of a calibration method "fixed,-bound,bound"; None for "absmax".

    Raises:
        ValueError: `method` is another one; `flag` names it in the message.
    """
    if method == "absmax":
        return None
    bound = re.fullmatch(r"fixed, *-(\d+\.?\d*), *\1", method)
    if bound is None or float(bound[1]) == 0:
        raise ValueError(
            f'maxtext: {flag}: expected "absmax" or "fixed,-bound,bound" with one '
            f'bound above 0, such as "fixed,-224,224", got {method!r}'
        )
    return float(bound[1])


def _grouped(module, original):
    """Wrap MaxText's grouped product: with a recipe in the place of a dtype it is
    jaxfp8's.
    """

    def gmm(lhs, rhs, group_sizes, *args, **options):
        recipe = options.get("lhs_quantize_dtype")
        if not isinstance(recipe, Recipe):
            return original(lhs, rhs, group_sizes, *args, **options)
        state = next_state() if keeps_state(recipe) else None
        _check_served(recipe, state, lhs, rhs, options)
        if recipe.pipeline_axes is None:
            manual = jax.sharding.get_abstract_mesh().manual_axes
            stages = tuple(axis for axis in STAGES if axis in manual)
            recipe = dataclasses.replace(recipe, pipeline_axes=stages)
        return ragged_dot(
            lhs,
            rhs,
            # A ring of experts has the sizes of all experts, those at hand first.
            group_sizes[: rhs.shape[0]],
            recipe=recipe,
            state=state,
            preferred_element_type=options["preferred_element_type"],
        )

    return gmm


def _check_served(recipe: Recipe, state, lhs, rhs, options: dict) -> None:
    """Raise a ValueError that names the flag of MaxText by which experts make a product
    that jaxfp8 lacks.
    """
    if state is None and keeps_state(recipe):
        raise ValueError(
            "maxtext: sparse_matmul: expected a grouped product of RoutedMoE with a "
            f"recipe that keeps state, got one of another class with {recipe!r}; set "
            "sparse_matmul=false, or for example quantization=te_fp8_currentscaling"
        )
    offset = options.get("group_offset")
    is_set = {
        "use_tokamax_gmm": options.get("use_tokamax_backend"),
        "num_moe_emb_chunks": options.get("partial_sum") is not None,
        # An array is the place of the device's experts among all of them.
        "use_ragged_sort": isinstance(offset, jax.Array) or offset,
        # Codes of other libraries are no arrays.
        "moe_quantize_token_all_gather": not isinstance(lhs, jax.Array),
        "checkpoint_is_quantized": not isinstance(rhs, jax.Array),
    }
    for flag in filter(is_set.get, is_set):
        raise ValueError(
            f"maxtext: {flag}: expected its default, under which grouped products can "
            f"be jaxfp8's, got another value; unset {flag}, or set sparse_matmul=false"
        )


def _keep_codes(module, original):
    """Wrap MaxText's policy of rematerialization: `with_quantization` then keeps
    jaxfp8's FP8 residuals too.
    """

    def minimal_policy(self, with_context=False, with_quantization=False):
        policy = original(self, with_context, with_quantization)
        if not with_quantization:
            return policy
        return jax.checkpoint_policies.save_from_both_policies(
            policy, checkpoint_policies.save_fp8_residuals
        )

    return minimal_policy


def _share_state(module, original):
    """Wrap MaxText's loss: all uses of one state in it combine by max."""

    def loss_fn(model, *args, **options):
        with max_grad(model):
            return original(model, *args, **options)

    return loss_fn


# --------------------------------------------------------------------------- its checks


def _parse(module, original):
    """Wrap MaxText's parser of its configuration: it knows block scaling, and FP8 with
    gradient accumulation and in grouped products.
    """

    def parse(argv=None, config_class=module.types.MaxTextConfig, **options):
        return original(argv, config_class=_config_class(config_class), **options)

    return parse


@functools.cache
def _config_class(base):
    from pydantic import model_validator

    field = base.model_fields["quantization"]
    validate = base.set_derived_and_validate_values

    class MaxTextConfig(base):
        quantization: field.annotation | Literal[_BLOCK] = field

        # in place of the validator of this name in the base class
        @model_validator(mode="after")
        def set_derived_and_validate_values(self):
            quantization = self.quantization
            if quantization not in _RECIPES:
                return validate(self)
            # experts call `megablox.gmm` under this flag only
            self.megablox = True
            if self.gradient_accumulation_steps > 1:
                self.quantization = "te_no_quant"  # quantized for all other checks
            try:
                return validate(self)
            finally:
                self.quantization = quantization

    return MaxTextConfig


def _check(module, original):
    """Wrap MaxText's check of a training configuration, which asserts that FP8 does not
    accumulate.
    """

    def check(config):
        if config.quantization in _RECIPES:
            config = With(config, gradient_accumulation_steps=1)
        return original(config)

    return check


if __name__ == "__main__":
    from absl import app

    # `__main__` is a second copy of this module, which must not hold state
    from jaxfp8.integrations import maxtext

    maxtext.install()
    app.run(sys.modules[_TRAIN].main)
