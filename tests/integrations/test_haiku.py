"""Haiku: FP8 state as parameters and as Haiku state; three steps of each against the
oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from programs import cases
from programs.known_amax import HISTORY, OPERANDS

import jaxfp8

KEY = jax.random.key(0)

hk = pytest.importorskip("haiku")

STEPS = 3
RATE = 0.1
TX = jaxfp8.train.optimizer(optax.sgd(RATE))


def kernel_parameter(x):
    return hk.get_parameter(
        "w", (x.shape[-1], cases.N), init=hk.initializers.RandomNormal()
    )


class WithParameters(hk.Module):
    """State as parameters, by the names that Flax gives its variables; jaxfp8 finds
    such pairs in any tree.
    """

    def __call__(self, x):
        def quantizer(name):
            history = hk.get_parameter(
                f"{name}_amax_history", (HISTORY,), init=jnp.zeros
            )
            return jaxfp8.recipes.QuantizerState(
                history, hk.get_parameter(f"{name}_scale", (1,), init=jnp.ones)
            )

        state = jaxfp8.DotGeneralState(*map(quantizer, OPERANDS))
        return cases.product(x, kernel_parameter(x), state)


class WithHaikuState(hk.Module):
    """State as Haiku state, which is differentiated like the parameters and never
    set.
    """

    def __call__(self, x):
        state = hk.get_state(
            "fp8", (), jnp.float32, init=lambda *_: jaxfp8.init_state(cases.RECIPE)
        )
        return cases.product(x, kernel_parameter(x), state)


def state_of(parameters):
    """The DotGeneralState of a module that holds it as parameters."""

    def quantizer(name):
        return jaxfp8.recipes.QuantizerState(
            parameters[f"{name}_amax_history"], parameters[f"{name}_scale"]
        )

    return jaxfp8.DotGeneralState(*map(quantizer, OPERANDS))


def as_parameters(x):
    transformed = hk.without_apply_rng(
        hk.transform(lambda x: WithParameters(name="layer")(x))
    )
    variables = transformed.init(KEY, x)
    return (
        variables,
        transformed.apply,
        lambda v: v["layer"]["w"],
        lambda v: state_of(v["layer"]),
    )


def as_haiku_state(x):
    transformed = hk.without_apply_rng(
        hk.transform_with_state(lambda x: WithHaikuState(name="layer")(x))
    )
    variables = transformed.init(KEY, x)

    def apply(variables, x):
        y, state = transformed.apply(*variables, x)
        assert jax.tree.structure(state) == jax.tree.structure(variables[1]), (
            "the forward pass leaves it alone"
        )
        return y

    return (
        variables,
        apply,
        lambda v: v[0]["layer"]["w"],
        lambda v: v[1]["layer"]["fp8"],
    )


@pytest.mark.parametrize("make", [as_parameters, as_haiku_state])
def test_trains(make):
    x, _, grad = cases.operands(STEPS)
    variables, apply, kernel_of, state_of = make(x[0])
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
        cases.assert_state(state_of(variables), state, f"step {i}")
        expected.wgrad.check(dkernel, f"step {i}: wgrad")
        assert not np.array_equal(kernel_of(variables), before)
