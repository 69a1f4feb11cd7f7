"""Make the rows of a report: a layer, its recipe and the reason."""

from typing import Any

from ..recipes import DelayedScaling, HighPrecision, _autocast

COLUMNS = ("layer", "kind", "input", "kernel", "recipe", "why")


def rule_text(index: int, rule) -> str:
    """Return the name of a rule in a report: its index, its regex and its operations."""
    ops = f" {'/'.join(rule.op_names)}" if rule.op_names else ""
    return f"rule {index} {rule.path!r}{ops}"


def row(layer: str, kind: str, recipe, why: str, input=None, kernel=None) -> dict[str, Any]:
    """Return a row as a dict, in the order of `COLUMNS`."""
    recipe = None if isinstance(recipe, HighPrecision) else recipe
    return dict(zip(COLUMNS, (layer, kind, input, kernel, recipe, why), strict=True))


def why_no_product(reasons, module) -> str | None:
    """Return the reason why a module has no FP8 product, from `reasons` by class or tuple of classes; or None."""
    return next((reason for classes, reason in reasons.items() if isinstance(module, classes)), None)


def first_matrix(params) -> tuple[int, ...] | None:
    """Return the shape of a module's kernel, or else of its first parameter with two or more dimensions; or None."""
    shapes = {name: tuple(value.shape) for name, value in params.items() if len(getattr(value, "shape", ())) > 1}
    return shapes.get("kernel", next(iter(shapes.values()), None))


def skipped(rule: str, matched, reason: str) -> str:
    """Return why a module that a rule matches runs in high precision: by the rule, or because it has no FP8 product."""
    return rule if matched.recipe is None else f"skipped: {reason} ({rule})"


def recipe_and_reason(named, default, rule: str | None):
    """Return `(recipe, why)` of an FP8 product that is traced here.

    Args:
        named: the recipe from a rule, or from the code; or None.
        default: a function without arguments; it returns the recipe of a product that names none, outside of
            `autocast`.
        rule: the text of the rule, where a rule decides; else None.
    """
    # With a recipe given, only `autocast(enabled=False)` makes `resolve` return None.
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
