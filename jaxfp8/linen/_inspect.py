"""The side of Linen for jaxfp8.inspect: a model as a function, and the names of layers."""

from flax import linen as nn

from ..dot import _wrapping
from ._state import Fp8Module


def is_model(x) -> bool:
    """Tell whether `x` is a Linen module."""
    return isinstance(x, nn.Module)


def naming():
    """Enter a context in which every FP8 product of a Linen module says the path of its layer."""
    return nn.intercept_methods(_name)


def _name(next_method, args, kwargs, context):
    module = context.module
    if not isinstance(module, Fp8Module):
        return next_method(*args, **kwargs)
    with _wrapping.layer("/".join(layer_path(module))):
        return next_method(*args, **kwargs)


def layer_path(product) -> tuple[str, ...]:
    """Get the path of a bound product's layer: the module that holds the product, unless the code named the product."""
    return product.path[:-1] if product.path and product.path[-1] == f"{type(product).__name__}_0" else product.path
