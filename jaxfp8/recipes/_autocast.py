"""autocast: the recipe of layers that name no recipe."""

import asyncio
import contextlib
import contextvars
import dataclasses
from typing import Any, NamedTuple

import jax

from .._jax import _warnings
from . import _warning
from ._recipe import HighPrecision, Recipe, checked


class _Region(NamedTuple):
    recipe: Recipe | None
    enabled: bool


# This context is part of jit's cache key: another recipe is another program. Each thread has its own region.
_region = jax.make_user_context(default_value=None)
# The regions of the task that runs, outermost first: tasks of asyncio share a thread, which JAX cannot tell apart.
_regions_of_task = contextvars.ContextVar("regions", default=())


@dataclasses.dataclass(eq=False)
class _Entered:
    """A region that a task has entered.

    Attributes:
        region: the region.
        context: the entered context of JAX; None once it is left.
        has_ended: whether the block of the region has ended.
    """

    region: _Region
    context: Any
    has_ended: bool = False


@contextlib.contextmanager
def autocast(recipe: Recipe | None = None, enabled: bool = True):
    """Set the recipe of layers that name no recipe, for everything that is traced inside.

        with jaxfp8.autocast(jaxfp8.MXFP8BlockScaling()):
            loss, grads = train_step(state, batch)  # jitted: traced anew for another recipe

    Regions nest, the innermost wins; each thread has its own. The backward of a product has the recipe of its forward,
    also where the backward runs after the region. Initialize a model in the region in which it is used, because a
    layer has the state of its recipe.

    Do not await inside of a region: jit's cache tells threads apart, but not tasks. While a region awaits, another
    task of the thread that traces, or opens a region, gets an error, and a program that it compiled before runs with
    this region's recipe. A warning says where a region awaits.

    A region in which products are traced, and no layer that takes a recipe, gives an FP8StateWarning when it ends. A
    call of a function that jit has compiled in an equal region traces nothing and says nothing: it runs the recipe that
    it was traced with. A recipe that has reached a layer once is warned about again only where a gradient of such
    products is taken. A region in which a layer runs too says nothing of the products beside the layer.

    Args:
        recipe: the recipe of layers that name no recipe; None is `DelayedScaling()`, the default outside of regions.
        enabled: False computes in high precision all that is traced inside, layers with a recipe of their own too.
            These layers create no state, and state that they have is left alone.

    Raises:
        TypeError: `recipe` is neither a Recipe nor None, or `enabled` is not a bool.
        RuntimeError: the region of another asyncio task is open on this thread.
    """
    if recipe is not None:
        checked("autocast: recipe", recipe)
    if not isinstance(enabled, bool):
        raise TypeError(f"autocast: enabled: expected a bool, got {enabled!r}")
    _current()
    region = _Region(recipe, enabled)
    entered = _Entered(region, _region(region))
    entered.context.__enter__()
    _regions_of_task.set((*_regions_of_task.get(), entered))
    try:
        asks_for_fp8 = enabled and not isinstance(recipe, HighPrecision)
        with _warning_of_awaits(), _warning.warning(recipe, asks_for_fp8):
            yield
    finally:
        entered.has_ended = True
        _leave_ended(entered)


def _leave_ended(entered: _Entered) -> None:
    """Leave `entered`, which has ended, and the regions around it that ended before.

    A region may end while one inside of it is open, as those of two generators do. JAX's contexts are left in the
    reverse order alone, so such a region waits for the one inside, which wins until then.
    """
    regions = _regions_of_task.get()
    if entered not in regions:  # a generator may end in another task than it began in
        regions = (*regions, entered)
    while regions and regions[-1].has_ended:
        *regions, last = regions
        context, last.context = last.context, None
        if context is not None:  # another task that inherited the region may have left it
            context.__exit__(None, None, None)
    _regions_of_task.set(tuple(regions))


@contextlib.contextmanager
def _warning_of_awaits():
    """Warn where the event loop goes on inside a region: no hook sees the programs that another task then runs."""
    message = (
        "autocast: this region awaits: until it ends, programs that other tasks of this thread run may take its "
        "recipe, for JAX caches programs by thread. Leave the region before each await, or give each task its thread "
        "(asyncio.to_thread)"
    )
    try:
        handle = asyncio.get_running_loop().call_soon(_warnings.warn, message, RuntimeWarning, _warnings.user_line())
    except RuntimeError:  # no loop
        handle = None
    try:
        yield
    finally:
        if handle is not None:
            handle.cancel()


def _current() -> _Region | None:
    """Return the region here in the program."""
    region = _region.value
    regions = _regions_of_task.get()
    if region is not None and not (regions and region is regions[-1].region):
        raise RuntimeError(
            "autocast: the region of another asyncio task is open on this thread, and JAX caches programs by thread: "
            "leave the region before each await, or give each task its thread (asyncio.to_thread)"
        )
    return region


def is_off() -> bool:
    """Tell whether what is traced here computes in high precision whatever its recipe."""
    region = _current()
    return region is not None and not region.enabled


def resolve(recipe: Recipe | None, default) -> Recipe | None:
    """Return the recipe of a layer, here in the program; None is high precision.

    Args:
        recipe: the recipe that the layer names, or None.
        default: a function without arguments; it returns the recipe of a layer that names none, outside of `autocast`.

    Raises:
        TypeError: `recipe`, or the result of `default`, is not a Recipe.
    """
    _warning.layer_asks()
    if is_off():
        return None
    if recipe is None:
        region = _current()
        recipe = default() if region is None or region.recipe is None else region.recipe
    return None if isinstance(checked("layer: recipe", recipe), HighPrecision) else recipe
