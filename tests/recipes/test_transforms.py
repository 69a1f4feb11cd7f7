"""Every kind of recipe under JAX's transformations: what each program quantizes together, by the oracle."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

import jaxfp8
from jaxfp8 import checkpoint_policies
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


# ------------------------------------------------------------------------- uses one by one: each has its own scales


def loop(f, x, kernel, grad):
    return sum(f(x[i], kernel, grad[i]) for i in range(USES))


def scan(f, x, kernel, grad):
    return lax.scan(lambda total, use: (total + f(use[0], kernel, use[1]), None), jnp.float32(0), (x, grad))[0]


def scan_of_remat(f, x, kernel, grad):
    return scan(jax.checkpoint(f, prevent_cse=False), x, kernel, grad)


def cond(f, x, kernel, grad):
    """Each use is in a branch that is taken."""

    def one(x, kernel, grad):
        return lax.cond(jnp.sum(x) < jnp.inf, f, lambda x, kernel, grad: jnp.float32(0), x, kernel, grad)

    return loop(one, x, kernel, grad)


def remat(policy):
    return lambda f, x, kernel, grad: loop(jax.checkpoint(f, policy=policy), x, kernel, grad)


PROGRAMS = {
    "loop": loop,
    "scan": scan,
    "scan of remat": scan_of_remat,
    "map": lambda f, x, kernel, grad: jnp.sum(lax.map(lambda use: f(use[0], kernel, use[1]), (x, grad))),
    "cond": cond,
    "remat": remat(None),
    "save_fp8_residuals": remat(checkpoint_policies.save_fp8_residuals),
    "save_gemm_outputs": remat(checkpoint_policies.save_gemm_outputs),
    "save both": remat(checkpoint_policies.save_fp8_residuals_and_gemm_outputs),
    "dots_saveable": remat(jax.checkpoint_policies.dots_saveable),
}


def expected(name, x, kernel, grad):
    rule = RECIPES[name][1]
    return [SHAPES.expected(rule, x[i], kernel, grad[i]) for i in range(USES)]


# Each program with one kind of recipe; the rest is slow.
ONE_BY_ONE = [
    pytest.param(program, name, marks=[] if i % len(KINDS) == j else pytest.mark.slow)
    for i, program in enumerate(PROGRAMS)
    for j, name in enumerate(KINDS)
]


@pytest.mark.parametrize("program, name", ONE_BY_ONE)
@pytest.mark.varied
def test_one_by_one(name, program):
    recipe = RECIPES[name][0]
    x, kernel, grad = data()
    run = jax.jit(jax.grad(functools.partial(PROGRAMS[program], functools.partial(term, recipe)), argnums=(0, 1)))
    dx, dkernel = run(x, kernel, grad)
    steps = expected(name, x, kernel, grad)
    for i, step in enumerate(steps):
        first(step.dx).check(dx[i], f"dx of use {i}")
    cases.sum_of([first(step.dkernel) for step in steps]).check(dkernel.T, "dkernel")


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
def test_gradient_accumulation(name):
    """Microbatches: gradients add, and there is no state to combine."""
    recipe = RECIPES[name][0]
    x, kernel, grad = data()
    gradient = jax.jit(jax.grad(lambda variables, *use: term(recipe, use[0], variables["params"], use[1])))
    total = None
    for use in zip(x, grad, strict=True):
        one = gradient({"params": kernel}, *use)
        total = one if total is None else jaxfp8.accumulate_gradients(total, one)
    steps = expected(name, x, kernel, grad)
    cases.sum_of([first(step.dkernel) for step in steps]).check(total["params"].T, "accumulated")


# --------------------------------------------------------------------------------------------------------------- vmap


@pytest.mark.parametrize("name", KINDS)
def test_vmap_over_examples(name):
    """x alone has a batch: one product with more rows, forward and backward."""
    recipe, rule = RECIPES[name]
    x, kernel, grad = data()
    run = jax.jit(
        jax.value_and_grad(
            lambda x, kernel: jnp.sum(jax.vmap(functools.partial(term, recipe), in_axes=(0, None, 0))(x, kernel, grad)),
            argnums=(0, 1),
        )
    )
    shapes = cases.dense(USES * M, K, N)
    wanted = shapes.expected(rule, x.reshape(-1, K), kernel, grad.reshape(-1, N))
    _, (dx, dkernel) = run(x, kernel)
    first(wanted.dx).check(dx.reshape(-1, K), "dx")
    first(wanted.dkernel).check(dkernel.T, "dkernel")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("x_dim, kernel_dim", [(0, 0), (1, 2), (None, 0)], ids=str)
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
        cases.sum_of([first(step.dx) for step in steps]).check(dx, "dx")
    else:
        for i, of in enumerate(np.moveaxis(dx, x_dim, 0)):
            first(steps[i].dx).check(of, f"dx of {i}")


# ---------------------------------------------------------------------------------------------------------- Flax loops


@pytest.mark.parametrize(
    "name", ["current", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mx", "rowwise", "block"))]
)
@pytest.mark.parametrize("is_remat", [False, True], ids=["scan", "scan of remat"])
@pytest.mark.varied
def test_linen_scan_over_layers(name, is_remat):
    """Layers of an `nn.scan`: no collection of state to lift, and the bits of a scan over plain functions."""
    recipe = RECIPES[name][0]

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            cls = functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
            return jnp.tanh(nn.Dense(K, use_bias=False, dot_general_cls=cls, name="dense")(x)), None

    axes = {"params": 0, jaxfp8.OVERWRITE_WITH_GRADIENT: 0}
    layer = nn.remat(Layer, prevent_cse=False) if is_remat else Layer
    model = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=USES)()
    x, _, _ = data()
    variables = model.init(jax.random.key(0), x[0], None)
    assert list(variables) == ["params"]

    def by_hand(variables, x):
        def body(x, kernel):
            return jnp.tanh(jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe)), None

        return lax.scan(body, x, variables["params"]["dense"]["kernel"])[0]

    run = [
        jax.jit(jax.grad(lambda variables, f=f: jnp.sum(jnp.cos(f(variables, x[0])))))(variables)
        for f in (lambda variables, x: model.apply(variables, x, None)[0], by_hand)
    ]
    (got,), (wanted,) = map(jax.tree.leaves, run)
    oracle.assert_bitwise(got, np.asarray(wanted), "kernels")


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
