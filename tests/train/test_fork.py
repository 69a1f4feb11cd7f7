"""train.fork: a state that a program threads by hand; its uses combine by max."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from programs.cases import MATMUL

import jaxfp8

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
KERNEL = np.full((8, 4), 0.5, np.float32)
XS = np.stack([np.full((2, 8), value, np.float32) for value in (1, 5, 3)])


def product(x, state):
    return jaxfp8.dot_general(x, KERNEL, MATMUL, recipe=RECIPE, state=state).sum()


def state_with_a_past():
    """Two steps: the history is not empty, so that sums show in its tail."""
    state = jax.grad(product, argnums=1)(XS[0] * 2, jaxfp8.init_state(RECIPE))
    return jax.grad(product, argnums=1)(XS[0] * 7, state)


def assert_max(next_state, old):
    np.testing.assert_array_equal(
        next_state.input.amax_history, np.float32([5, *old.input.amax_history[2:], 7])
    )
    oracle.assert_bitwise(
        next_state.input.scale, np.float32([7]) / np.float32(448), "scale"
    )


def threaded(state):
    """The state in the carry of a scan."""

    def body(carry, x):
        state, total = carry
        state, used = jaxfp8.train.fork(state)
        return (state, total + product(x, used)), None

    return jax.lax.scan(body, (state, jnp.float32(0)), XS)[0][1]


def test_two_handles():
    old = state_with_a_past()

    def twice(state):
        first, second = jaxfp8.train.fork(state)
        return product(XS[1], first) + product(XS[2], second)

    assert_max(jax.grad(twice)(old), old)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("gradient", [jax.grad, jaxfp8.grad], ids=["jax", "ours"])
def test_the_carry_of_a_scan(jit, gradient):
    old = state_with_a_past()
    assert_max(jit(gradient(threaded))(old), old)
