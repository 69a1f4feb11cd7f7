"""Higher derivatives of recipes, and that the oracle tells recipes apart; programs are in `programs/`."""

import dataclasses

import jax
import jax.numpy as jnp
import oracle
import pytest

from recipes import cases
from recipes.cases import KINDS, RECIPES

SHAPES = cases.dense(5, 36, 4)
X, KERNEL, GRAD, _ = SHAPES.arrays()


def twice(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("transform", [jax.hessian, jax.jacfwd, twice], ids=["hessian", "jacfwd", "grad of grad"])
@pytest.mark.varied
def test_only_first_derivatives(name, transform):
    product = cases.product(SHAPES, RECIPES[name][0])
    with pytest.raises(TypeError, match="first derivatives"):
        transform(lambda x: jnp.vdot(product(x, KERNEL), GRAD) ** 2)(X)


def check(name, **fields):
    """A recipe beside its oracle, with another rule where fields are given."""
    recipe, rule = RECIPES[name]
    wanted = SHAPES.expected(dataclasses.replace(rule, **fields), X, KERNEL, GRAD)
    SHAPES.check(wanted, *cases.run(SHAPES, recipe, X, KERNEL, GRAD)[:3])


# Powers of two round alike in any block: that those of MX lie right, only codes and scales show (test_products.py).
MUTANTS = {
    "scale of a row, not of the tensor": ("current", {"tile": (1, None)}),
    "scale of the tensor, not of a row": ("rowwise", {"tile": None}),
    "kernel in tiles": ("block", {"square": (1, 128)}),
    "e5m2 backward": ("mx", {"backward": oracle.E5M2}),
    "e4m3 backward": ("current", {"backward": oracle.E4M3}),
    "floor": ("mx", {"rounding": "floor"}),
    "powers of two": ("block", {"power_2_scale": True}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_tells_recipes_apart(mutant):
    name, fields = MUTANTS[mutant]
    check(name)
    with pytest.raises(AssertionError, match="out of bound"):
        check(name, **fields)
