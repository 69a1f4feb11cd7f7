"""Products of Linen in a wrong place, and state that they do not read: messages that
say where it belongs.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from .._jax import _warnings
from ..recipes import OVERWRITE_WITH_GRADIENT, FP8StateWarning

# How the user gets from TransformerEngine's state to that of a product.
TRANSFORMER_ENGINE_BY_HAND = (
    "convert TransformerEngine's state by hand, once (docs/inference.md): scale = 1 "
    "/ its scale, and amax_history = jnp.roll(its amax_history, 1, axis=-1), which "
    "moves its newest amax from the last slot to slot 0, and its empty slot 0 to slot "
    "1, the oldest"
)
# The beginnings of names of modules and collections with state of other libraries, by
# how to convert it.
_CONVERTERS = {
    "convert them once: variables = jaxfp8.convert.from_flax(variables)": (
        "Fp8DirectDotGeneralOp_",
        "Fp8DotGeneralOp_",
    ),
    TRANSFORMER_ENGINE_BY_HAND: ("TEWrapper_dot_general_", "fp8_metas"),
}


def refuse_unbound(product: nn.Module, method: Callable[..., Any]) -> None:
    """Refuse the call of a product that no Linen module holds, as a layer of NNX makes
    it.
    """
    if product.scope is None and method.__name__ == "__call__":
        name = type(product).__name__
        raise TypeError(
            f"{name}: expected a call from a Linen module, or by init or apply, got a "
            "call of an unbound product; a layer of NNX takes "
            f"dot_general=jaxfp8.nnx.{name}(recipe), and attention is changed by "
            "jaxfp8.quantize(model, rules) when it is made"
        )


def refuse_immutable_state(product: nn.Module, recipe: Any) -> None:
    """Refuse an `init` that cannot write the state: the model would silently train
    without state.
    """
    raise ValueError(
        f"{'/'.join(product.path)}: {type(recipe).__name__} keeps state, and the "
        f"collection {OVERWRITE_WITH_GRADIENT!r} cannot be written here: treat it as "
        "the parameters. Where an nn.scan broadcasts parameters, as nn.RNN does, pass "
        f"variable_broadcast=('params', {OVERWRITE_WITH_GRADIENT!r}); where an "
        "nn.scan or nn.vmap stacks them, add it to the variable_axes. Or add it to "
        "the mutable of init, or take a recipe without state"
    )


def refuse_frozen_kernel(layer: nn.Module, has_rule: bool) -> None:
    """Refuse the read of a frozen kernel by a layer of Flax without an FP8 product,
    which would compute NaN.

    Args:
        layer: the module that reads the kernel.
        has_rule: whether a rule gives the layer FP8.
    """
    has_class = getattr(layer, "dot_general_cls", layer) is not None
    product = getattr(layer, "dot_general", None)
    is_plain = not has_class and product in (None, jax.lax.dot_general)
    if is_plain or (isinstance(layer, nn.Einsum) and not has_rule):
        raise ValueError(
            f"{'/'.join(layer.path) or type(layer).__name__}: params: expected the "
            "kernel of a layer in high precision, got variables of jaxfp8.freeze, "
            "which hold its codes; apply the frozen model, with the same rules or "
            "dot_general_cls, or take the variables from before freeze"
        )


def warn_of_foreign_state(layer: nn.Module | None, path: tuple[str, ...]) -> None:
    """Warn where the layer at `path` has the state of another library's product, which
    jaxfp8 does not read.
    """
    collections = getattr(layer, "variables", {})
    modules = collections.get(OVERWRITE_WITH_GRADIENT, {})
    for name in (*modules, *set(collections) - {"params"}):
        for way_out, prefixes in _CONVERTERS.items():
            if name.startswith(prefixes):
                message = (
                    f"the variables have state {name!r} of another library, which "
                    f"this layer does not read; {way_out}"
                )
                at = "/".join(path)
                _warnings.warn_once(layer.scope.root, at, message, FP8StateWarning)
                return
