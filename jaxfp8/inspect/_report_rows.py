"""The rows of a report: a layer, what it runs and the words for why."""

from typing import Any

from ..recipes import DelayedScaling, HighPrecision, _autocast

COLUMNS = ("layer", "kind", "input", "kernel", "recipe", "why")


def rule_text(index: int, rule) -> str:
    ops = f" {'/'.join(rule.op_names)}" if rule.op_names else ""
    return f"rule {index} {rule.path!r}{ops}"


def row(layer: str, kind: str, recipe, why: str, input=None, kernel=None) -> dict[str, Any]:
    recipe = None if isinstance(recipe, HighPrecision) else recipe
    values = {"layer": layer, "kind": kind, "input": input, "kernel": kernel, "recipe": recipe, "why": why}
    return {column: values[column] for column in COLUMNS}


def first_matrix(params) -> tuple[int, ...] | None:
    """The shape of a module's kernel, or else of its first parameter that is no vector."""
    shapes = {name: tuple(value.shape) for name, value in params.items() if len(getattr(value, "shape", ())) > 1}
    return shapes.get("kernel", next(iter(shapes.values()), None))


def skipped(rule: str, matched, reason: str) -> str:
    """Why a module that a rule matches runs in high precision; a rule that wants just that is honoured."""
    return rule if matched.recipe is None else f"skipped: {reason} ({rule})"


def recipe_and_reason(named, default, rule: str | None):
    """`(recipe, why)` of an FP8 product that runs here and now.

    Args:
        named: the recipe that its rule, or its code, gives it; or None.
        default: gives the recipe of one that has none, outside of `autocast`.
        rule: the rule, where there is one.
    """
    if _autocast.resolve(DelayedScaling(), DelayedScaling) is None:
        return None, "autocast is off"
    recipe = _autocast.resolve(named, default)
    if rule is not None:
        return recipe, rule
    if named is not None:
        return recipe, "own recipe"
    marker = DelayedScaling(amax_history_len=1)
    return recipe, "default" if _autocast.resolve(None, lambda: marker) is marker else "autocast"
