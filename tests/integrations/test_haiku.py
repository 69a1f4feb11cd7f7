"""Haiku: FP8 state as Haiku state; three steps against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from programs import cases
from programs.known_amax import HISTORY

import jaxfp8

KEY = jax.random.key(0)

hk = pytest.importorskip("haiku")

STEPS = 3
RATE = 0.1
TX = jaxfp8.train.optimizer(optax.sgd(RATE))


class WithHaikuState(hk.Module):
    """State as Haiku state, which is differentiated like the parameters and never
    set.
    """

    def __call__(self, x):
        state = hk.get_state(
            "fp8", (), jnp.float32, init=lambda *_: jaxfp8.init_state(cases.RECIPE)
        )
        init = hk.initializers.RandomNormal()
        kernel = hk.get_parameter("w", (x.shape[-1], cases.N), init=init)
        return cases.product(x, kernel, state)


def test_trains():
    x, _, grad = cases.operands(STEPS)
    transformed = hk.without_apply_rng(
        hk.transform_with_state(lambda x: WithHaikuState(name="layer")(x))
    )
    variables = transformed.init(KEY, x[0])

    def apply(variables, x):
        y, state = transformed.apply(*variables, x)
        assert jax.tree.structure(state) == jax.tree.structure(variables[1]), (
            "the forward pass leaves it alone"
        )
        return y

    def kernel_of(variables):
        return variables[0]["layer"]["w"]

    state = oracle.LayerState.init(HISTORY)
    opt_state = TX.init(variables)

    @jax.jit
    def step(variables, opt_state, x, grad):
        gradient = jax.grad(lambda v: jnp.vdot(apply(v, x), grad))(variables)
        updates, opt_state = TX.update(gradient, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state, kernel_of(gradient)

    for i in range(STEPS):
        before = np.asarray(kernel_of(variables))
        expected = cases.one_product(x[i], before, grad[i], state)
        variables, opt_state, dkernel = step(variables, opt_state, x[i], grad[i])
        state = expected.state
        cases.assert_state(variables[1]["layer"]["fp8"], state, f"step {i}")
        expected.wgrad.check(dkernel, f"step {i}: wgrad")
        assert not np.array_equal(kernel_of(variables), before)
