"""Rules: what a list may hold, and which of its rules holds for a layer."""

import pytest

import jaxfp8
from jaxfp8.recipes import _rules

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
UNHASHABLE = type("Algo", (), {"__hash__": None, "__call__": print})()


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
            TypeError,
            r"rules\[0\]: path_regex: expected a string",
        ),
        (
            [("(head", RECIPE)],
            ValueError,
            r"rules\[0\]: path_regex: '\(head' is not a regular expression",
        ),
        ([("head", "fp8")], TypeError, r"rules\[0\]: recipe.*got 'fp8'"),
        (
            [("head", jaxfp8.DelayedScaling)],
            TypeError,
            r"rules\[0\]: recipe.*call the class",
        ),
        (
            [("head", jaxfp8.DelayedScaling(amax_compute_algo=UNHASHABLE))],
            TypeError,
            r"rules\[0\]: recipe: a recipe in a rule must hash",
        ),
    ],
)
def test_bad_rules_are_named(rules, error, message):
    with pytest.raises(error, match=message):
        _rules.checked_rules("op", rules)


def test_pairs_become_rules():
    rules = _rules.checked_rules("op", [["head", None], ("a/.*", RECIPE)])
    assert rules == (_rules.Rule("head", None), _rules.Rule("a/.*", RECIPE))
    assert _rules.checked_rules("op", []) == ()


@pytest.mark.parametrize(
    ("paths", "op", "index"),
    [
        (["head"], "dot_general", 0),
        (["model/head"], "dot_general", 3),  # as a whole, not a part
        (["block1/mlp"], "dot_general", 2),
        (["block1/mlp"], "einsum", 1),
        (["other", "head"], "dot_general", 0),  # a layer of two names
        (["nothing"], "dot_general", None),
    ],
)
def test_first_match(paths, op, index):
    rules = _rules.checked_rules(
        "op",
        [
            ("head", None),
            _rules.Rule("block.*", None, ("einsum",)),
            ("block.*", RECIPE),
            (".*/.*", None),
        ],
    )
    assert _rules.first_match(rules, paths, op) == index
