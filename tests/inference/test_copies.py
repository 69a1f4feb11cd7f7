"""Copies that never train (a reference policy, a teacher, a target network) are as
accurate as trained models.

A copy that is made before the first step has empty histories. Its products have no
backward, so they take the scale of each tensor's own amax where the state would give 1.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal
from jax import lax
from parametrize import each_row
from programs.cases import MATMUL

import jaxfp8
import jaxfp8.nnx

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
M, K = 32, 64
# e4m3 rounds a number by at most 2**-4 of it. The error of both operands is
# independent, and at most uniform.
BOUND = np.sqrt(2 / 3) / 16
X = normal(M, K)
# One tensor that loses its small numbers at scale 1, and one that saturates.
KERNELS = {"small kernel": 0.002, "large channel": 0.05}
INPUTS = {
    "small kernel": X,
    "large channel": X * np.where(np.arange(K) == 3, 2000, 1).astype(np.float32),
}
CASES = pytest.mark.parametrize("case", KERNELS)


def kernels(case, *leading):
    return normal(*leading, K, K, seed=1) * np.float32(KERNELS[case])


def error(y, exact) -> float:
    y, exact = (np.asarray(a, np.float64) for a in (y, exact))
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


def product(x, kernel, state, recipe=RECIPE):
    return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)


def differentiated(function, *arguments):
    """The value of a function in the program of its gradient: it trains, at scale 1."""
    return jax.vjp(function, *arguments)[0]


def empty(*leading):
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (*leading, *leaf.shape)),
        jaxfp8.init_state(RECIPE),
    )


# ---------------------------------------------------------------------------- functions


def members(x, kernel, state):
    return jax.vmap(product, in_axes=(None, 0, 0))(x, kernel, state)


def layers(x, kernel, state):
    """Layers whose activations keep their size, and whose state is read before the
    loop.
    """

    def layer(x, kernel_and_state):
        y = product(x, *kernel_and_state)
        return x + y, y

    return lax.scan(layer, x, (kernel, jaxfp8.max_grad(state)))[1]


def layers_in_float32(x, kernel):
    ys = []
    for each in kernel:
        ys.append(x @ each)
        x = x + ys[-1]
    return np.stack(ys)


def ragged(x, kernel, state):
    return jaxfp8.ragged_dot(
        x, kernel, np.int32([10, M - 10]), recipe=RECIPE, state=state
    )


def ragged_in_float32(x, kernel):
    return np.concatenate([x[:10] @ kernel[0], x[10:] @ kernel[1]])


def activates(x, kernel, state):
    return jaxfp8.dot_general(
        x, kernel, MATMUL, recipe=RECIPE, state=state, activation="relu"
    ).value


def algorithm(x, kernel, state):
    return product(
        x,
        kernel,
        state,
        jaxfp8.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda h: h[0]),
    )


# Each as (FP8, float32, leading dimensions of kernels, leading dimensions of the
# state).
FUNCTIONS = {
    "dot_general": (product, np.matmul, (), ()),
    "vmap over members": (members, np.matmul, (3,), (3,)),
    "scan of a reading": (layers, layers_in_float32, (3,), (3,)),
    "ragged_dot": (ragged, ragged_in_float32, (2,), ()),
    "activation": (activates, lambda x, kernel: np.maximum(x @ kernel, 0), (), ()),
    "algorithm": (algorithm, np.matmul, (), ()),
}


@CASES
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@each_row("fp8, float32, of_kernel, of_state", FUNCTIONS)
def test_functions(fp8, float32, of_kernel, of_state, jit, case):
    x = INPUTS[case]
    kernel = kernels(case, *of_kernel)
    state = empty(*of_state)
    exact = float32(x.astype(np.float64), kernel.astype(np.float64))
    y = (jax.jit(fp8) if jit else fp8)(x, kernel, state)
    assert error(y, exact) < BOUND
    # The control: the same products with a backward.
    assert (
        error(differentiated(jax.jit(fp8) if jit else fp8, x, kernel, state), exact)
        > 4 * BOUND
    )


@pytest.mark.parametrize("touched", ["input", "kernel"])
def test_each_tensor_by_itself(touched):
    """A tensor that has an amax keeps the scale of its history, bit for bit; the other
    takes its own.
    """
    x = INPUTS["large channel"]
    kernel = kernels("small kernel")
    used = jaxfp8.recipes.QuantizerState(jnp.array([0, 0, 3.0, 0]), jnp.ones(1))
    state = jaxfp8.init_state(RECIPE)
    fields = {
        "input": state.input,
        "kernel": state.kernel,
        "output_grad": state.output_grad,
    }
    got = product(x, kernel, jaxfp8.DotGeneralState(**fields | {touched: used}))
    amaxes = {"input": np.abs(x).max(), "kernel": np.abs(kernel).max(), touched: 3.0}
    known = {
        name: jaxfp8.recipes.QuantizerState(jnp.full(4, amax, jnp.float32), jnp.ones(1))
        for name, amax in amaxes.items()
    }
    expected = differentiated(
        product, x, kernel, jaxfp8.DotGeneralState(**fields | known)
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    "history, scale",
    [
        ([0, 0, 0, 3.0], 1.0),
        ([0, 0, 0, 448.0], 2.0),  # whose scale is 1
        ([0, 0, 0, 0], 0.25),
        ([np.inf, 0, 0, 2.0], 1.0),
        ([0, 0, -1.0, 0], 1.0),
        ([0, 0, 0, 0], -1.0),
    ],
)
def test_a_touched_state_gives_the_bits_of_training(history, scale):
    """A state with an amax or a scale; below zero it is NaN."""
    state = jaxfp8.recipes.QuantizerState(
        jnp.array(history, jnp.float32), jnp.full(1, scale)
    )
    arguments = X, kernels("small kernel"), jaxfp8.DotGeneralState(state, state, state)
    np.testing.assert_array_equal(
        product(*arguments), differentiated(product, *arguments)
    )


@pytest.mark.parametrize("operand", [0, 1, 2], ids=["x", "kernel", "state"])
def test_a_gradient_of_one_operand_trains(operand):
    """Whatever the gradient is taken of, the product is that of training."""
    arguments = [
        INPUTS["large channel"],
        kernels("large channel"),
        jaxfp8.init_state(RECIPE),
    ]

    def of_one(value):
        return product(*arguments[:operand], value, *arguments[operand + 1 :])

    expected = differentiated(product, *arguments)
    with (
        pytest.warns(jaxfp8.FP8StateWarning)
        if operand == 1
        else contextlib.nullcontext()
    ):
        np.testing.assert_array_equal(
            differentiated(of_one, arguments[operand]), expected
        )


# ---------------------------------------------------------------------------- structure


STEPS = {
    "jaxfp8.grad": lambda f: jaxfp8.grad(f, argnums=(0, 1, 2)),
    "of the kernel": lambda f: jax.grad(f, argnums=(1, 2)),
    "vmap of checkpoint": lambda f: jax.vmap(
        jax.grad(jax.checkpoint(f), argnums=(0, 1, 2)), in_axes=(None, 0, 0)
    ),
}


@each_row("step", STEPS)
@pytest.mark.parametrize("name", ["dot_general", "scan of a reading", "activation"])
def test_programs_of_training_have_no_conditional(name, step):
    fp8, _, of_kernel, of_state = FUNCTIONS[name]
    more = (2,) if step is STEPS["vmap of checkpoint"] else ()
    arguments = X, kernels("small kernel", *more, *of_kernel), empty(*more, *of_state)
    loss = step(lambda *arguments: jnp.sum(fp8(*arguments)))
    assert "stablehlo.case" not in jax.jit(loss).lower(*arguments).as_text()


def test_programs_of_inference_stay_on_the_device():
    """A conditional for each tensor; no callback and no transfer."""
    arguments = X, kernels("small kernel"), jaxfp8.init_state(RECIPE)
    text = jax.jit(product).lower(*arguments).compile().as_text()
    assert text.count(" conditional(") == 2
    for word in ("infeed(", "outfeed(", "send(", "recv(", "callback"):
        assert word not in text
