"""Rules: what a list may hold."""

import pytest

import jaxfp8
from jaxfp8.recipes import _rules

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ("head", TypeError, "op: rules: expected a list"),
        ({"head": RECIPE}, TypeError, "op: rules: expected a list"),
        (None, TypeError, "op: rules: expected a list"),
        ([("head", RECIPE), "head"], TypeError, r"op: rules\[1\]: expected a pair"),
        ([("head",)], TypeError, r"rules\[0\]: expected a pair"),
        (
            [(("a", "b"), RECIPE)],
            ValueError,
            r"rules\[0\]: path_regex: expected a regular expression.*\('a', 'b'\)",
        ),
        (
            [("(head", RECIPE)],
            ValueError,
            r"rules\[0\]: path_regex: expected a regular expression.*'\(head': missing",
        ),
        ([("head", "fp8")], TypeError, r"rules\[0\]: recipe.*got 'fp8'"),
        (
            [("head", jaxfp8.DelayedScaling)],
            TypeError,
            r"rules\[0\]: recipe.*call the class",
        ),
    ],
)
def test_bad_rules_are_named(rules, error, message):
    with pytest.raises(error, match=message):
        _rules.checked_rules("op", rules)
