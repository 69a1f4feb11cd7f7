"""examples/custom_recipes.py: its table and picture, and what its recipes say of
themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8

from . import running

NAME = "custom_recipes"
MATMUL = (((1,), (0,)), ((), ()))


def test_prints_a_table(tmp_path):
    done = running.run(tmp_path, NAME, "--tiny")
    table = running.rows(done.stdout.splitlines())
    assert set(table) == {"arm", "bf16", "mixed", "int6", "rotated", "picture:"}
    for arm in ("bf16", "mixed", "int6", "rotated"):
        assert 0 < float(table[arm][0]) < 5  # log(103 characters) is 4.6
    assert (tmp_path / "custom_recipes.png").stat().st_size > 10_000


def products(recipe, state=None, seed=0):
    """(exact, got, next state): y, dx and dkernel of a layer."""
    rng = np.random.default_rng(seed)
    x, kernel, grad = (
        rng.standard_normal(shape) for shape in ((64, 96), (96, 32), (64, 32))
    )
    exact = x @ kernel, grad @ kernel.T, x.T @ grad
    x, kernel, grad = (jnp.asarray(a, jnp.float32) for a in (x, kernel, grad))
    state = jaxfp8.init_state(recipe) if state is None else state
    y, vjp = jax.vjp(
        lambda x, kernel, state: jaxfp8.dot_general(
            x, kernel, MATMUL, recipe=recipe, state=state
        ),
        x,
        kernel,
        state,
    )
    *gradients, state = vjp(grad)
    return exact, (y, *gradients), state


def decibel(exact, got):
    return 10 * np.log10(np.sum(np.square(exact)) / np.sum(np.square(got - exact)))


# A step of rows of normal numbers is their amax, about 2.6 deviations, over 31 or 127;
# the error of rounding to the nearest is step**2 / 12, at random step**2 / 6; two
# operands have it. FP8's best is 28.7 dB.
@pytest.mark.parametrize(
    ("name", "least", "most"), [("int6", 24, 31), ("rotated", 33.5, 40)]
)
def test_precision(example, name, least, most):
    exact, got, _ = products(example.RECIPES[name])
    for e, g in zip(exact, got, strict=True):
        assert least < decibel(e, np.asarray(g, np.float64)) < most
