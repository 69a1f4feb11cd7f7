"""autocast: the recipe of layers that name no recipe."""

import contextlib
import threading

import jax

from ..ops import _checks
from ._recipe import HighPrecision, Recipe, checked

# The recipe of the innermost region: None is the default, False high precision for all.
# This context is part of jit's cache key: another recipe is another program. Each
# thread has its own region.
_region = jax.make_user_context(default_value=None)
# The open regions of each thread, outermost first: the recipe by the context of JAX.
_thread = threading.local()


@contextlib.contextmanager
def autocast(recipe: Recipe | None = None, enabled: bool = True):
    """Set the recipe of layers that name no recipe, for everything that is traced
    inside.

        with jaxfp8.autocast(jaxfp8.MXFP8BlockScaling()):
            # jitted: traced anew for another recipe
            loss, grads = train_step(state, batch)

    Regions nest, the innermost wins; each thread has its own. The backward of a product
    has the recipe of its forward, also where the backward runs after the region.
    Initialize a model in the region in which it is used, because a layer has the state
    of its recipe.

    Do not await inside of a region: jit's cache tells threads apart, but not tasks, and
    another task of the thread runs with this region's recipe. Leave the region before
    each await, or give each task its thread (`asyncio.to_thread`).

    A call of a function that jit has compiled in an equal region traces nothing: it
    runs the recipe that it was traced with. A region in which no layer takes a recipe
    has no effect; `jaxfp8.inspect.assert_fp8` is the guard.

    Args:
        recipe: the recipe of layers that name no recipe; None is `DelayedScaling()`,
            the default outside of regions.
        enabled: False computes in high precision all that is traced inside, layers with
            a recipe of their own too. These layers create no state, and state that they
            have is left alone.

    Raises:
        TypeError: `recipe` is neither a Recipe nor None, or `enabled` is not a bool.
    """
    if recipe is not None:
        checked("autocast: recipe", recipe)
    region = _checks.flag("autocast", "enabled", enabled) and recipe
    regions = _thread.__dict__.setdefault("regions", {})
    context = _region(region)
    regions[context] = region
    context.__enter__()
    try:
        yield
    finally:
        # A region may end while one inside of it is open, as those of two generators
        # do. JAX's contexts are left in the reverse order alone: enter another one.
        del regions[context]
        innermost = next(reversed(regions.values()), None)
        _region(innermost).__enter__()


def is_off() -> bool:
    """Tell whether what is traced here computes in high precision whatever its
    recipe.
    """
    return _region.value is False


def resolve(recipe: Recipe | None, default: Recipe) -> Recipe | None:
    """Return the recipe of a layer, here in the program; None is high precision.

    Args:
        recipe: the recipe that the layer names, or None.
        default: the recipe of a layer that names none, outside of `autocast`.

    Raises:
        TypeError: `recipe` or `default` is not a Recipe.
    """
    if is_off():
        return None
    if recipe is None:
        recipe = _region.value or default
    recipe = checked("layer: recipe", recipe)
    return None if isinstance(recipe, HighPrecision) else recipe
