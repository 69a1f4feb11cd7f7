"""The rows of a report: a layer, its recipe and the reason."""

from typing import Any

from ..recipes import DelayedScaling, HighPrecision, _autocast

COLUMNS = ("layer", "kind", "input", "kernel", "recipe", "why")


def rule_text(index: int, rule) -> str:
    """Return how a report calls a rule."""
    ops = f" {'/'.join(rule.op_names)}" if rule.op_names else ""
    return f"rule {index} {rule.path!r}{ops}"


def row(layer: str, kind: str, recipe, why: str, input=None, kernel=None) -> dict[str, Any]:
    """Return a row, its columns in order."""
    recipe = None if isinstance(recipe, HighPrecision) else recipe
    return dict(zip(COLUMNS, (layer, kind, input, kernel, recipe, why), strict=True))


def why_no_product(reasons, module) -> str | None:
    """Return the reason, out of those by class or classes, why a module has no FP8 product; or None."""
    return next((reason for classes, reason in reasons.items() if isinstance(module, classes)), None)


def first_matrix(params) -> tuple[int, ...] | None:
    """Return the shape of a module's kernel, or else of its first parameter that is no vector."""
    shapes = {name: tuple(value.shape) for name, value in params.items() if len(getattr(value, "shape", ())) > 1}
    return shapes.get("kernel", next(iter(shapes.values()), None))


def skipped(rule: str, matched, reason: str) -> str:
    """Return why a module that a rule matches runs in high precision; a rule that asks for just that is honoured."""
    return rule if matched.recipe is None else f"skipped: {reason} ({rule})"


def recipe_and_reason(named, default, rule: str | None):
    """Return `(recipe, why)` of an FP8 product that runs here and now.

    Args:
        named: the recipe from a rule, or from the code; or None.
        default: gives the recipe of a product without one, outside of `autocast`.
        rule: the text of the rule, where a rule decides.
    """
    # With a recipe given, only `autocast(enabled=False)` answers None.
    if _autocast.resolve(DelayedScaling(), DelayedScaling) is None:
        return None, "autocast is off"
    recipe = _autocast.resolve(named, default)
    if rule is not None:
        return recipe, rule
    if named is not None:
        return recipe, "own recipe"
    # `resolve` returns the default itself unless an `autocast` decides, so a marker tells which it was.
    marker = DelayedScaling(amax_history_len=1)
    return recipe, "default" if _autocast.resolve(None, lambda: marker) is marker else "autocast"
