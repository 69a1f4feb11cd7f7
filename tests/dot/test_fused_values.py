"""Products of fused inputs: values, gradients and state against formulas in float64;
where they are not fused.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from equality import assert_same_bits
from parametrize import each_row
from programs import known_amax

import jaxfp8
from jaxfp8 import ops

from . import fused_cases as cases
from .fused_cases import BF16, CASES, F16, F32, RECIPE


@pytest.mark.parametrize("implementation", ["ffi", "reference"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_steps(name, dtype, implementation):
    """Two steps after others: the second records what the first has seen one slot
    further.
    """
    case, expected = CASES[name], known_amax.used_state()
    state = cases.pack(expected)
    for i in range(2):
        operands = cases.operands(case, i, dtype)
        kernel, grad = cases.kernel_and_grad(i, dtype)
        with ops.implementation(implementation):
            got = cases.step(case, operands, kernel, grad, state)
        expected = cases.check_step(case, operands, kernel, grad, expected, got)
        state = got[-1]


def loss(
    case, operands, kernel, state, is_fused, dimension_numbers=None, recipe=RECIPE
):
    """Of the fused input, or of its value."""
    fused = case.fuse(*operands)
    x = fused if is_fused else fused.value
    numbers = dimension_numbers or (((len(x.shape) - 1,), (0,)), ((), ()))
    y = jaxfp8.dot_general(x, kernel, numbers, recipe=recipe, state=state)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def both(case, operands, kernel, state, **options):
    """Values and gradients, `(fused, of the value)`."""
    wanted = jax.value_and_grad(
        lambda *a, is_fused: loss(case, *a, is_fused, **options), argnums=(0, 1, 2)
    )
    return [
        wanted(operands, kernel, state, is_fused=is_fused) for is_fused in (True, False)
    ]


NOT_FUSED = {
    "another dimension": ((cases.ROWS,), (cases.ROWS, 3), (((0,), (0,)), ((), ()))),
    "two dimensions": ((2, 3), (3, cases.INNER, 4), (((1, 2), (0, 1)), ((), ()))),
    "batches": ((2, 3), (2, cases.INNER, 4), (((2,), (1,)), ((0,), (0,)))),
    "a vector": ((), (cases.INNER, 4), (((0,), (0,)), ((), ()))),
}


@each_row("rows, kernel_shape, dimension_numbers", NOT_FUSED)
@pytest.mark.parametrize("name", ["silu_gated", "layer with bias"])
def test_products_that_are_not_fused(name, rows, kernel_shape, dimension_numbers):
    """They take the value: the bits are those of the product of the value, in bf16
    too.
    """
    operands = cases.operands(CASES[name], 0, BF16, rows)
    kernel = normal(*kernel_shape, seed=1)
    got, expected = both(
        CASES[name],
        operands,
        kernel,
        jaxfp8.init_state(RECIPE),
        dimension_numbers=dimension_numbers,
    )
    assert_same_bits(got, expected, "not fused")


NOT_FUSED_RECIPES = {
    "small": jaxfp8.DelayedScaling(amax_history_len=cases.HISTORY, min_size=100),
    # the products of x do not share its codes
    "by product": jaxfp8.ByProduct(jaxfp8.Float8CurrentScaling(), None, None),
}


@each_row("recipe", NOT_FUSED_RECIPES)
@pytest.mark.parametrize("name", ["gelu_gated", "rms"])
def test_recipes_that_do_not_fuse(name, recipe):
    operands = cases.operands(CASES[name], 0, BF16)
    kernel, _ = cases.kernel_and_grad()
    got, expected = both(
        CASES[name], operands, kernel, jaxfp8.init_state(recipe), recipe=recipe
    )
    assert_same_bits(got, expected, "not fused")
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(got[1][2])), (
        "the state is not touched"
    )


@pytest.mark.parametrize("name", CASES)
def test_scales_of_the_tensor_at_hand(name):
    """Without state, and in the first step of "current": the scale is that of the
    value's amax, in f32 the same one.
    """
    operands, (kernel, _) = cases.operands(CASES[name]), cases.kernel_and_grad()
    stateless = jaxfp8.DotGeneralState(None, None, None)
    # there is nothing to update
    with warnings.catch_warnings(action="error", category=jaxfp8.FP8StateWarning):
        got, expected = both(CASES[name], operands, kernel, stateless)
    assert_same_bits(got, expected, "without state")
    recipe = jaxfp8.DelayedScaling(amax_history_len=cases.HISTORY, first_step="current")
    got, expected = both(
        CASES[name], operands, kernel, jaxfp8.init_state(recipe), recipe=recipe
    )
    assert_same_bits(got, expected, "current")
    top = got[1][2].input.amax_history[0]
    scale = oracle.amax_to_scale(top, oracle.E4M3)
    oracle.assert_bitwise(
        got[1][2].input.scale, np.reshape(1 / scale, 1), "scale of the first step"
    )


X = np.ones((3, 2, 4), F32)
BAD = {
    "activation": (
        lambda: jaxfp8.activated(X, "tanh"),
        ValueError,
        r"activated: activation: expected one of .*'tanh'",
    ),
    "pair": (
        lambda: jaxfp8.activated(X[:, 0], "silu_gated"),
        ValueError,
        r"activated: x: expected \[..., 2, n\]",
    ),
    "integers": (
        lambda: jaxfp8.activated(X.astype(int), "silu"),
        TypeError,
        "activated: x: expected bfloat16",
    ),
    "float64": (
        lambda: jaxfp8.activated(X.astype(float), "silu"),
        TypeError,
        "activated: x: .*float64",
    ),
    "kind": (
        lambda: jaxfp8.normalized(X, X[0, 0], kind="batch"),
        ValueError,
        "normalized: kind: expected one of",
    ),
    "scale": (
        lambda: jaxfp8.normalized(X, X[0], kind="rms"),
        ValueError,
        r"normalized: scale: expected shape \(4,\)",
    ),
    "bias": (
        lambda: jaxfp8.normalized(X, X[0, 0], X[0], kind="layer"),
        ValueError,
        "normalized: bias: expected shape",
    ),
    "rms": (
        lambda: jaxfp8.normalized(X, X[0, 0], X[0, 0], kind="rms"),
        ValueError,
        "normalized: bias: expected None",
    ),
    "epsilon": (
        lambda: jaxfp8.normalized(X, X[0, 0], kind="rms", epsilon=-1.0),
        ValueError,
        "normalized: epsilon: expected",
    ),
    "product": (
        lambda: cases.product(
            jaxfp8.activated(X, "silu"), np.ones((5, 2), F32), jaxfp8.init_state(RECIPE)
        ),
        ValueError,
        "dimension_numbers",
    ),
}


@each_row("call, error, message", BAD)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
