"""TransformerEngine's Flax state: scales that multiply to quantize, and histories *after* their rotation.

With amaxes 1, 2, 3, 4, 5 and H = 4, after the last step (`f` is FP8_MAX / amax / 2**margin):

                          history              scale
    jaxfp8                [5, 2, 3, 4]         1 / f(4), the inverse of the scale of step 5
    TransformerEngine     [0, 3, 4, 5]         f(5), the scale of step 6

TransformerEngine has already computed the next scale and dropped the oldest amax; jaxfp8 does both when the next step
reads the state.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..numerics import _scaling, fp8_max
from ..recipes import DelayedScaling, DelayedScalingQuantizer
from . import _tree
from ._tree import OVERWRITE_WITH_GRADIENT

_FP8_METAS = "fp8_metas"
_COLLECTIONS = (_FP8_METAS, OVERWRITE_WITH_GRADIENT)
_MODULE = "Fp8DotGeneral"
_WRAPPER = "TEWrapper_dot_general"
_NAMES = {"x": "input", "kernel": "kernel", "grad": "output_grad"}


def from_transformer_engine(variables: Mapping[str, Any], recipe: DelayedScaling | None = None) -> dict[str, Any]:
    """Convert state of TransformerEngine's Flax modules (2.4 and later, delayed scaling) for `Fp8DotGeneral`.

        TransformerEngine                                   jaxfp8, in `_overwrite_with_gradient`
        collection fp8_metas (its modules):
          <layer>/{x,kernel,grad}_{amax_history,scale}        <layer>/Fp8DotGeneral_0/{input,kernel,output_grad}_{…}
          <layer>/{x,kernel,grad}_1_{…} (LayerNormMLP)        <layer>/Fp8DotGeneral_1/{…}
        collection _overwrite_with_gradient (make_dot_general_cls):
          <layer>/TEWrapper_dot_general_0/{x,kernel,grad}_…   <layer>/Fp8DotGeneral_0/{…}

        scale         multiplies to quantize; the next step's   1 / scale, which multiplies to dequantize
        amax_history  [0, a_2, …, a_N], after rotation          [a_N, a_1, a_2, …], before rotation: slot 0 newest,
                                                                slot 1 oldest

    The scales of the next step and of all later steps equal TransformerEngine's to the bit. TransformerEngine's history
    no longer holds the oldest amax `a_1`. Where `a_1` set the scale, an amax that gives the same scale takes its slot,
    which is the next to be dropped. There are three exceptions:

    - An Inf in the history freezes the scale in TransformerEngine, and counts as 0 in jaxfp8.
    - A scale larger than the history allows (frozen at an Inf, or from another recipe) gives way to the scale of the
      history.
    - With `"most_recent"` and a newest amax of 0 the scale may be off by an ulp, because jaxfp8 stores its inverse.

    Layers keep their paths. The caller renames modules with other names, and parameters.

    Args:
        variables: all variables of a model (collections without state are kept as they are), or one collection alone.
            Leaves may be stacked.
        recipe: the recipe of the run, of which `margin`, `amax_compute_algo` and `fp8_format` are read; None is
            `DelayedScaling()`.

    Returns:
        Nested dicts with state in float32.

    Raises:
        ValueError: the tree has no state, an unknown or a missing variable, shapes that do not fit, or a history whose
            slot 0 is not 0; TransformerEngine keeps 0 there between steps.
        TypeError: `variables` is not a dict, a leaf is not a floating array, or the recipe is not delayed scaling.
    """
    where = "from_transformer_engine"
    quantizers = _quantizers(where, recipe)

    def convert(modules: _tree.Modules):
        for path, module in modules.items():
            # A module of TransformerEngine may have several products; here each product is a module.
            for postfix, (name, operand) in itertools.product(_postfixes(where, path, module), _NAMES.items()):
                history, scale = _tree.quantizer(where, path, module, name + postfix)
                # State that is in jaxfp8's layout already would be converted without an error, one slot off.
                _expect_rotated(_tree.at(path, name + postfix), history)
                before = _before_rotation(quantizers[operand], jnp.asarray(history), jnp.asarray(scale))
                yield _our_path(path, postfix), _tree.named(operand, *before)

    return _tree.convert_state(where, variables, _COLLECTIONS, OVERWRITE_WITH_GRADIENT, convert)


def to_transformer_engine(
    variables: Mapping[str, Any], recipe: DelayedScaling | None = None, *, collection: str = _FP8_METAS
) -> dict[str, Any]:
    """Convert jaxfp8's state for TransformerEngine, whose next step gets the scale of jaxfp8's next step.

    Histories and scales that `from_transformer_engine` converted go back to the bit, with the exceptions named there.

    Args:
        variables: all variables of a model, or its `_overwrite_with_gradient` collection alone.
        recipe: the recipe of the run; None is `DelayedScaling()`.
        collection: `"fp8_metas"` for TransformerEngine's own modules, `"_overwrite_with_gradient"` for Flax layers
            with a `make_dot_general_cls` class.

    Returns:
        Nested dicts. Entries of a history that are negative or not finite become 0.

    Raises:
        ValueError: the tree has no state or a module that is not an `Fp8DotGeneral_<n>`, or `collection` is neither of
            the two.
        TypeError: as `from_transformer_engine`.
    """
    where = "to_transformer_engine"
    quantizers = _quantizers(where, recipe)
    if collection not in _COLLECTIONS:
        raise ValueError(f"{where}: collection: expected one of {_COLLECTIONS}, got {collection!r}")

    def convert(modules: _tree.Modules):
        # `layers` holds a layer once for each of its products: the number of products decides about the names.
        layers = [path[:-1] for path in modules]
        for path, module in modules.items():
            match = re.fullmatch(rf"{_MODULE}_(\d+)", path[-1]) if path else None
            if match is None:
                raise ValueError(
                    f"{where}: {_tree.at(path) or 'variables'}: expected modules named {_MODULE}_<n>, in a layer of "
                    "TransformerEngine's; drop or rename this one"
                )
            # A layer with one product (DenseGeneral) has no postfix, a layer with several (LayerNormMLP) _0, _1, ...
            is_wrapped = collection == OVERWRITE_WITH_GRADIENT
            target = (*path[:-1], f"{_WRAPPER}_{match[1]}") if is_wrapped else path[:-1]
            postfix = "" if is_wrapped or layers.count(path[:-1]) == 1 else f"_{match[1]}"
            for name, operand in _NAMES.items():
                history, scale = _tree.quantizer(where, path, module, operand)
                after = _after_rotation(quantizers[operand], jnp.asarray(history), jnp.asarray(scale))
                yield target, _tree.named(name + postfix, *after)

    return _tree.convert_state(where, variables, (OVERWRITE_WITH_GRADIENT,), collection, convert)


# --------------------------------------------------------------------------------------------------------------- names


def _quantizers(where, recipe) -> dict[str, DelayedScalingQuantizer]:
    recipe = DelayedScaling() if recipe is None else recipe
    if not isinstance(recipe, DelayedScaling):
        raise TypeError(
            f"{where}: recipe: expected DelayedScaling, the one recipe for which TransformerEngine keeps state, got "
            f"{type(recipe).__name__}"
        )
    return dict(zip(_tree.OPERANDS, recipe.quantizers(), strict=True))


def _postfixes(where, path, module) -> list[str]:
    """Return the postfix of each product in one module of TransformerEngine: `[""]`, or `["_0", "_1"]`."""
    postfixes = []
    for name in module:
        match = re.fullmatch(r"(?:x|kernel|grad)(|_\d+)_(?:scale|amax_history)", name)
        if match is None:
            raise ValueError(
                f"{where}: {_tree.at(path, name)}: expected variables named {{x,kernel,grad}}[_<n>]_{{amax_history,"
                "scale}, as TransformerEngine 2.4 and later has them for delayed scaling"
            )
        if match[1] not in postfixes:
            postfixes.append(match[1])
    return postfixes


def _our_path(path, postfix) -> tuple[str, ...]:
    name = path[-1] if path else ""
    # A wrapper in a Flax layer is a product. A layer of TransformerEngine holds its products itself.
    if re.fullmatch(rf"{_WRAPPER}_\d+", name) and not postfix:
        return (*path[:-1], name.replace(_WRAPPER, _MODULE))
    return (*path, _MODULE + (postfix or "_0"))


# ------------------------------------------------------------------------------------------------------------- numbers


def _expect_rotated(name, history):
    newest = np.asarray(history)[..., 0]
    if newest.any():
        raise ValueError(
            f"from_transformer_engine: {name}_amax_history: expected 0 in slot 0, where TransformerEngine puts the "
            f"next amax, got {newest.max()}; is this state already in the layout of jaxfp8?"
        )


def _next_scale(quantizer, history, scale_inv):
    """Compute the scale `[..., 1]` of the next step, from jaxfp8's history `[..., H]` and scale_inv `[..., 1]`."""
    algo = quantizer.amax_compute_algo
    history = _scaling.clean(history)
    # A user's algorithm reads one history; stacked histories are mapped over.
    if callable(algo):
        amax = jnp.vectorize(lambda h: jnp.asarray(algo(h), jnp.float32).reshape(()), signature="(h)->()")(history)
    else:
        amax = history[..., 0] if algo == "most_recent" else _scaling.abs_max(history, axis=-1)
    return _scaling.amax_to_scale(amax[..., None], scale_inv, _numerator(quantizer))[0]


def _numerator(quantizer):
    return _scaling.scale_numerator(fp8_max(quantizer.fp8_dtype), quantizer.margin)


@jax.jit(static_argnums=0)
def _after_rotation(quantizer, history, scale_inv):
    """Convert jaxfp8's `(history, scale_inv)` to TransformerEngine's `(history, scale)`."""
    # [5, 2, 3, 4] becomes [2, 3, 4, 5]; then 0 replaces the oldest amax, 2: slot 0 waits for the next amax.
    rotated = jnp.roll(_scaling.clean(history), -1, axis=-1).at[..., 0].set(0)
    return rotated, _next_scale(quantizer, history, scale_inv)


@jax.jit(static_argnums=0)
def _before_rotation(quantizer, rotated, scale):
    """Convert TransformerEngine's `(history, scale)` to jaxfp8's `(history, scale_inv)`."""
    # 1. Invert the scale, and undo the rotation: the slot of the dropped amax, the oldest, gets slot 0's zero.
    usable = _scaling.positive_finite(scale)
    scale = jnp.where(usable, jnp.clip(scale, _scaling.MIN_SCALE, _scaling.MAX_SCALE), jnp.float32(1))
    scale_inv = _scaling.round_quotient(jnp.ones_like(scale), scale)
    history = jnp.roll(rotated, 1, axis=-1)

    # 2. Find an amax that the dropped amax may have been: with f(a) for FP8_MAX / a / 2**margin rounded to float32,
    # f(f(f(a))) = f(a) for every a, so f(scale) is an amax that gives the scale.
    dropped = _scaling.round_quotient(jnp.full_like(scale, _numerator(quantizer)), scale)
    candidate = history.at[..., 1 % history.shape[-1]].set(dropped[..., 0])
    # 3. Take that amax only where it explains the scale and the history does not.
    unit = jnp.ones_like(scale)
    explained = _next_scale(quantizer, history, unit) == scale
    explains = usable & (_next_scale(quantizer, candidate, unit) == scale)
    return jnp.where(~explained & explains, candidate, history), scale_inv
