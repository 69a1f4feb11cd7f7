"""quantize: a model of either framework in FP8, by rules."""

from flax import linen as nn, nnx

from .. import linen, nnx as jaxfp8_nnx
from .._jax._trees import Tree
from ..recipes import Rules, kind


def quantize(model: Tree, rules: Rules) -> Tree:
    """Put the layers of a model in FP8 as the rules say, by `linen.quantize` or
    `nnx.quantize`.

        model = jaxfp8.quantize(
            model, [("head", None), (r".*mlp/.*", jaxfp8.DelayedScaling())]
        )

    Args:
        model: a Linen module, which is not changed, or an NNX module, which is changed
            in place.
        rules: pairs `(path_regex, recipe or None)`; the first rule whose regex matches
            the whole path of a layer decides, and the recipe None is high precision.

    Returns:
        For Linen a quantized module; for NNX `model`.

    Raises:
        TypeError: `model` is neither a Linen nor an NNX module.
        TypeError, ValueError: see `linen.quantize` and `nnx.quantize`.
    """
    if isinstance(model, nn.Module):
        return linen.quantize(model, rules)
    if isinstance(model, nnx.Module):
        return jaxfp8_nnx.quantize(model, rules)
    raise TypeError(
        "quantize: model: expected an instance of a Linen or an NNX module, got "
        f"{kind(model)}; in plain functions call jaxfp8.dot_general or jaxfp8.einsum"
    )
