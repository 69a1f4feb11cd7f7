"""Negative controls of rules: both frameworks read one list, and see each wrong way to
read it.
"""

import pytest
from linen import test_quantize as of_linen
from nnx import test_quantize as of_nnx

from jaxfp8.linen import _quantize_by_rules as linen_quantize
from jaxfp8.nnx import _quantize_by_rules as nnx_quantize
from jaxfp8.recipes import _rules

FRAMEWORKS = {"linen": (linen_quantize, of_linen), "nnx": (nnx_quantize, of_nnx)}
first_match = _rules.first_match


def last_match(rules, paths, op):
    return next(
        (i for i, rule in reversed(list(enumerate(rules))) if rule.matches(paths, op)),
        None,
    )


def without_none(rules, paths, op):
    index = first_match(rules, paths, op)
    return None if index is None or rules[index].recipe is None else index


def search(self, paths, op):
    del op
    return any(_rules.re.search(self.path, path) for path in paths)


def path_of_the_product_alone(path, is_product, root=()):
    del is_product
    return [_rules.relative(path, root)]


MUTANTS = {
    "last match": ("first_match", last_match),
    "None is no rule": ("first_match", without_none),
    "search": (_rules.Rule, "matches", search),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_mutants_are_caught(monkeypatch, framework, mutant):
    package, tests = FRAMEWORKS[framework]
    *target, name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(*(target or [package]), name, wrong)
    with pytest.raises(AssertionError):
        tests.compare_which_rule()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_names_without_the_layer_are_caught(monkeypatch, framework):
    """A rule may name a product by the layer that holds it."""
    package, tests = FRAMEWORKS[framework]
    monkeypatch.setattr(package, "layer_names", path_of_the_product_alone)
    with pytest.raises(AssertionError):
        tests.test_products_that_modules_hold()
