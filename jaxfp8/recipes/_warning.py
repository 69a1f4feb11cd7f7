"""FP8StateWarning, and the warning about an `autocast` region whose products ran, and no layer asked for its recipe.

Products are heard while Python traces: a call of a program that jit has kept is silent, and so are its layers. So a
recipe that has once reached a layer is not warned about again for products that run beside such a program, as those of
a metric, a generation or an optimizer do. Products with a gradient are those of a model: they are warned about also
then, and a function that is traced again is searched for the FP8 products that it was traced with before.
"""

import contextlib
import contextvars
import dataclasses

from .._jax import _primitives, _warnings


@dataclasses.dataclass
class _Heard:
    """Record of an open region: whether products in high precision ran, and whether a layer asked for a recipe.

    Attributes:
        recipe: the recipe of the region.
        asks_for_fp8: whether the region sets a recipe in FP8.
        has_product: whether a product ran in high precision.
        has_gradient: whether one of these products was differentiated.
        has_layer: whether a layer asked for its recipe, or a function with FP8 products ran.
    """

    recipe: object
    asks_for_fp8: bool
    has_product: bool = False
    has_gradient: bool = False
    has_layer: bool = False


# The open regions of this thread, the outermost first.
_open = contextvars.ContextVar("open", default=())
# The recipes of regions in which layers have asked. jit hashes these recipes as well.
_reached = set()


@contextlib.contextmanager
def warning(recipe, asks_for_fp8: bool):
    """Warn at the end of a region with this recipe in which products ran, and none asked for FP8."""
    _primitives.hear(_product)
    heard = _Heard(recipe, asks_for_fp8)
    _open.set((*_open.get(), heard))
    try:
        yield
    finally:
        _open.set(tuple(region for region in _open.get() if region is not heard))  # regions may end in any order
    is_model = heard.has_gradient or (heard.has_product and recipe not in _reached)
    if heard.asks_for_fp8 and is_model and not heard.has_layer:
        _warnings.warn(
            "autocast: no product in this region is in FP8: products ran, and none belongs to a layer that takes a "
            "recipe, such as nn.Dense(dot_general_cls=jaxfp8.Fp8DotGeneral); a layer that calls lax.dot_general or "
            "jnp.einsum itself stays in high precision. Give the layers of the model FP8 by jaxfp8.quantize or in its "
            "code, and see them by jaxfp8.report; or, where high precision is meant, use autocast(enabled=False)",
            FP8StateWarning,
        )


def layer_asks() -> None:
    """Note that a layer, or a product that names its recipe, runs in the regions that are open here."""
    for heard in _open.get():
        heard.has_layer = True
        if heard.asks_for_fp8:
            _reached.add(heard.recipe)


def _product(primitive, operands, params) -> None:
    """Note a product, or the products of a function that may have been traced before."""
    regions = _open.get()
    if not regions or regions[-1].has_layer:
        return
    names = {primitive.name}.union(*map(_primitives.names_within, _primitives.inner_jaxprs(params)))
    if any(name.startswith("fp8_product") or name.endswith("matmul") for name in names):
        for heard in regions:
            heard.has_layer = True
    elif "dot_general" in names:
        regions[-1].has_product = True
        regions[-1].has_gradient |= _primitives.is_differentiated(operands)


class FP8StateWarning(UserWarning):
    """The category of warnings about FP8 state and FP8 that is not there.

    State is not updated or not read, or its mesh axes are not known; or rules or a region reach no product.
    """
