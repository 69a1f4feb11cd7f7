"""Gradient accumulation: one history entry a step, the max over the microbatches,
bitwise; parameters add.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from programs.cases import sgd, stack_rows

from jaxfp8.train import accumulate_gradients, update_state

from . import replay

MICROBATCHES = 3
STEPS = 5


def microbatches(step: int):
    return [replay.batch(10 * step + i) for i in range(MICROBATCHES)]


def in_a_python_loop(variables, batches):
    total = None
    for x, grad in batches:
        total = accumulate_gradients(total, replay.gradient(variables, x, grad))
    return total


@jax.jit
def in_a_scan(variables, batches):
    def body(total, batch):
        return accumulate_gradients(
            total, jax.grad(replay.loss)(variables, *batch)
        ), None

    zeros = jax.tree.map(jnp.zeros_like, variables)
    return jax.lax.scan(body, zeros, stack_rows(batches))[0]


@pytest.mark.parametrize("accumulate", [in_a_python_loop, in_a_scan])
def test_training_with_microbatches(accumulate):
    """Steps of SGD on sums of microbatch gradients end in the replayed state; sums of
    amaxes would be up to 3 times.
    """
    variables = replay.variables()
    state = replay.first()
    for i in range(STEPS):
        batches = microbatches(i)
        total = accumulate(variables, batches)
        kernel = replay.kernel_of(variables)
        state = replay.step(state, kernel, batches)
        variables = update_state(variables, total)
        replay.assert_state(variables, state, f"step {i}")
        variables["params"] = sgd(variables["params"], total["params"], 0.1)


def test_the_mean_is_of_parameters_alone():
    variables = replay.variables()
    batches = microbatches(0)
    mean = None
    for batch in batches:
        mean = accumulate_gradients(
            mean, replay.gradient(variables, *batch), weight=0.25
        )
    total = in_a_python_loop(variables, batches)
    oracle.assert_bitwise(
        replay.kernel_of(mean),
        replay.kernel_of(total) * np.float32(0.25),
        "a power of two is exact",
    )
    for name, leaf in replay.state_of(total).items():
        oracle.assert_bitwise(replay.state_of(mean)[name], leaf, name)
    for weight in ("one third", [1, 2], 1j, np.ones(3)):
        with pytest.raises(
            (TypeError, ValueError), match="accumulate_gradients: weight: expected"
        ):
            accumulate_gradients(None, total, weight=weight)


def quantizer(history, scale):
    return {
        "input_amax_history": np.float32(history),
        "input_scale": np.float32([scale]),
    }


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_max_is_clean(transform):
    """Zero is neutral, subnormals count, and what is not finite or is negative never
    wins.
    """
    accumulate = transform(accumulate_gradients)
    tiny = np.float32(1e-42)
    first = quantizer([1, 0, np.nan, tiny], 0.5)
    second = quantizer([np.inf, 2, 3, 0], 0.5)
    expected = quantizer([1, 2, 3, tiny], 0.5)
    for a, b in ((first, second), (second, first)):
        got = accumulate(a, b)
        for name, leaf in expected.items():
            oracle.assert_bitwise(got[name], leaf, name)
    got = accumulate(quantizer(np.zeros(4), 0), quantizer([-1, -np.inf, 2, 0], -0.5))
    oracle.assert_bitwise(
        got["input_amax_history"], np.float32([0, 0, 2, 0]), "negative"
    )
    oracle.assert_bitwise(got["input_scale"], np.float32([0]), "negative scale")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_multiply_in_float32(dtype):
    """Three thirds are one, and a product that the narrow dtype does not hold is kept
    in a float32 sum.
    """
    ones = {"w": jnp.ones(2, dtype)}
    total = None
    for _ in range(3):
        total = accumulate_gradients(total, ones, weight=1 / 3)
    assert total["w"].dtype == dtype and total["w"].tolist() == [1, 1]
    small = {"w": jnp.full(2, 1e-7, dtype)}
    total = accumulate_gradients({"w": jnp.zeros(2, jnp.float32)}, small, weight=1 / 16)
    np.testing.assert_allclose(total["w"], np.float32(small["w"]) / 16, rtol=1e-6)
