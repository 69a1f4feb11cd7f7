"""Recipes under vmap along any axis, jit, accumulation and higher derivatives; programs are in `programs/`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from programs.known_amax import sum_of

import jaxfp8
from recipes import cases
from recipes.cases import KINDS, RECIPES

USES, M, K, N = 3, 5, 36, 4
SHAPES = cases.dense(M, K, N)


def data(*kernels):
    """x `[USES, M, K]`, kernel `[*kernels, K, N]`, grad `[USES, M, N]`; sizes differ from use to use."""
    rng = np.random.default_rng(0)
    size = np.float32(2.0) ** np.float32([0, 3, -2])[:, None, None]
    x, grad = (rng.standard_normal((USES, M, n)).astype(np.float32) * size for n in (K, N))
    return x, rng.standard_normal((*kernels, K, N)).astype(np.float32), grad


def first(product):
    return oracle.Product(product.exact[0], product.bound[0])


def term(recipe, x, kernel, grad):
    """`<x @ kernel, grad>`: so grad is what arrives at the product."""
    return jnp.vdot(jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe), grad)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("current", "mx") else pytest.mark.slow) for n in RECIPES]
)
def test_jit_is_eager(name):
    """To the bit."""
    recipe = RECIPES[name][0]
    x, kernel, grad = (a[0] for a in data(1))

    def both(x, kernel, grad):
        y, vjp = jax.vjp(cases.product(SHAPES, recipe), x, kernel)
        return y, vjp(grad)

    for got, wanted in zip(*(jax.tree.leaves(f(x, kernel, grad)) for f in (jax.jit(both), both)), strict=True):
        oracle.assert_bitwise(got, np.asarray(wanted), name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("x_dim, kernel_dim", [(1, 2), (None, 0)], ids=str)
@pytest.mark.varied
def test_vmap_over_members(name, x_dim, kernel_dim):
    """A batch of kernels: each member is a product of its own, with its own scales."""
    recipe, rule = RECIPES[name]
    x, kernel, grad = data(USES)
    x = x[0] if x_dim is None else x
    moved = [a if dim is None else np.moveaxis(a, 0, dim) for a, dim in ((x, x_dim), (kernel, kernel_dim))]

    @jax.jit
    def run(x, kernel):
        f = jax.vmap(lambda x, kernel: jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe), (x_dim, kernel_dim))
        y, vjp = jax.vjp(f, x, kernel)
        return y, *vjp(grad)

    y, dx, dkernel = run(*moved)
    dkernel = np.moveaxis(dkernel, kernel_dim, 0)
    steps = [SHAPES.expected(rule, x if x_dim is None else x[i], kernel[i], grad[i]) for i in range(USES)]
    for i, step in enumerate(steps):
        first(step.y).check(y[i], f"y of {i}")
        first(step.dkernel).check(dkernel[i].T, f"dkernel of {i}")
    if x_dim is None:
        sum_of([first(step.dx) for step in steps]).check(dx, "dx")
    else:
        for i, of in enumerate(np.moveaxis(dx, x_dim, 0)):
            first(steps[i].dx).check(of, f"dx of {i}")


# --------------------------------------------------------------------------------------------------------- derivatives


def twice(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("transform", [jax.hessian, jax.jacfwd, twice], ids=["hessian", "jacfwd", "grad of grad"])
@pytest.mark.varied
def test_only_first_derivatives(name, transform):
    recipe = RECIPES[name][0]
    x, kernel, grad = (a[0] for a in data(1))
    with pytest.raises(TypeError, match="first derivatives"):
        transform(lambda x: term(recipe, x, kernel, grad) ** 2)(x)


# ------------------------------------------------------------------------------------------------------------- mutants


def wrong(name, **fields):
    """A recipe beside its oracle with another rule."""
    recipe, rule = RECIPES[name]
    x, kernel, grad = (a[0] for a in data(1))
    got = cases.run(SHAPES, recipe, x, kernel, grad)[:3]
    SHAPES.check(SHAPES.expected(dataclasses.replace(rule, **fields), x, kernel, grad), *got)


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
    wrong(name)
    with pytest.raises(AssertionError, match="out of bound"):
        wrong(name, **fields)
