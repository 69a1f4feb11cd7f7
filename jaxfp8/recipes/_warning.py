"""FP8StateWarning, and the warning about an `autocast` region whose products ran, and no layer asked for its recipe.

What is heard is heard while Python traces: a call of a program that jit has kept is silent. The layers of such a
program are silent too, so a recipe that has once reached a layer is never warned about again.
"""

import contextlib
import contextvars
import dataclasses

from .._jax import _primitives, _warnings


@dataclasses.dataclass
class _Heard:
    """Record of an open region: whether a product ran in high precision, and whether a layer asked for a recipe."""

    recipe: object
    asks_for_fp8: bool
    has_product: bool = False
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
    if heard.asks_for_fp8 and heard.has_product and not heard.has_layer and recipe not in _reached:
        _warnings.warn(
            "autocast: no product in this region is in FP8: products ran, and none belongs to a layer that takes a "
            "recipe, such as nn.Dense(dot_general_cls=jaxfp8.Fp8DotGeneral); a layer that calls lax.dot_general or "
            "jnp.einsum itself stays in high precision. Give the layers of the model FP8 by jaxfp8.quantize or in its "
            "code, and see them by jaxfp8.report",
            FP8StateWarning,
        )


def layer_asks() -> None:
    """Note that a layer, or a product that names its recipe, runs in the regions that are open here."""
    for heard in _open.get():
        heard.has_layer = True
        if heard.asks_for_fp8:
            _reached.add(heard.recipe)


def _product() -> None:
    for heard in _open.get()[-1:]:
        heard.has_product = True


class FP8StateWarning(UserWarning):
    """The category of warnings about FP8 state and FP8 that is not there.

    State is not updated or not read, or its mesh axes are not known; or rules or a region reach no product.
    """
