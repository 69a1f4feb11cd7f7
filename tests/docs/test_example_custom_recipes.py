"""examples/custom_recipes.py: its table and picture, and what its recipes say of
themselves.
"""

import re

import jax
import ml_dtypes
import numpy as np
import pytest
from draws import normal
from programs.cases import MATMUL

import jaxfp8

from . import running

NAME = "custom_recipes"


def test_prints_a_table(tmp_path):
    done = running.run(tmp_path, NAME, "--tiny")
    table = running.rows(done.stdout.splitlines())
    arms = {"bf16", "mixed", "int6", "rotated", "residual"}
    assert set(table) == arms | {"arm", "picture:"}
    for arm in arms:
        assert 0 < float(table[arm][0]) < 5  # log(103 characters) is 4.6
    assert (tmp_path / "custom_recipes.png").stat().st_size > 10_000


# A step of rows of normal numbers is their amax, about 2.6 deviations, over 31 or 127;
# the error of rounding is step**2 / 12, and two operands have it. FP8 has 28.7 dB.
@pytest.mark.parametrize(
    ("name", "least", "most"), [("int6", 24, 31), ("rotated", 33.5, 40)]
)
def test_precision(example, name, least, most):
    x, kernel = normal(64, 96), normal(96, 32, seed=1)
    recipe = example.RECIPES[name]
    state = jaxfp8.init_state(recipe)
    y = jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
    noise = np.square(y - x @ kernel).sum() / np.square(x @ kernel).sum()
    assert least < -10 * np.log10(noise) < most


def e4m3(a, scale_inv):
    return (a / scale_inv).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


@pytest.mark.parametrize("part", [0.0, 0.21])
def test_residual_codes(example, part):
    """The product of codes of numpy's, with the worst columns of x twice."""
    x = normal(64, 96)
    kernel = normal(96, 32, seed=1)
    x[:, 7] *= 3.0
    recipe = example.residual(part)
    state = jaxfp8.init_state(recipe)
    # in training the first scales are 1: histories are empty
    q1, qw = e4m3(x, 1), e4m3(kernel, 1)
    q2 = e4m3(x - q1, 1)
    errors = (q2**2).sum(0) * (qw**2).sum(1)
    worst = np.argsort(-errors, kind="stable")[: round(part * 96)]
    assert (7 in worst) == (part > 0)
    expected = q1 @ qw + q2[:, worst] @ qw[worst]
    y, _ = jax.vjp(
        lambda x: jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state), x
    )
    # a sum of at most 116 products in float32
    bound = 116 * 2.0**-24 * (np.abs(q1) @ np.abs(qw) + np.abs(q2) @ np.abs(qw))
    assert np.all(np.abs(np.asarray(y) - expected) <= 2 * bound)


def test_residual_codes_cost_their_part_of_fprop(example):
    recipe = example.residual(0.21)
    state = jaxfp8.init_state(recipe)

    def gradients(x, kernel):
        y, vjp = jax.vjp(
            lambda x, kernel: jaxfp8.dot_general(
                x, kernel, MATMUL, recipe=recipe, state=state
            ),
            x,
            kernel,
        )
        return y, vjp(y)

    operands = normal(64, 96), normal(96, 32)
    with pytest.warns(jaxfp8.FP8StateWarning):
        text = jax.jit(gradients).lower(*operands).as_text()
    first = re.findall(r"dot_general .*\(tensor<(\d+x\d+)x\w+>,", text)
    # fprop contracts 96 columns and 20 of them again, dgrad 32 and wgrad 64
    assert first == ["64x116", "64x32", "96x64"]
