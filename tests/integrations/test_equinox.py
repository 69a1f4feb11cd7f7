"""Equinox: FP8 state is a field of a module, and every filtered transform treats it
right.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_same_bits
from equinox.internal import while_loop
from programs import cases
from programs.known_amax import used_state

import jaxfp8


class Linear(eqx.Module):
    """A layer for one vector, with leaves that are no arrays."""

    kernel: jax.Array
    state: jaxfp8.DotGeneralState
    activation: object = jax.nn.relu
    name: str = "linear"

    def __call__(self, x):
        return cases.product(x, self.kernel, self.state)


def setting(seed=0):
    """(model, x `[ROWS, K]`, grad of the result, the oracle's state)."""
    x, kernel, grad = cases.operands(seed=seed)
    state = used_state(seed)
    return Linear(jnp.asarray(kernel), cases.pack(state)), x, grad, state


def loss_fn(model, x, grad):
    """What arrives at the layer's output is `grad`, to the bit."""
    return jnp.vdot(jax.vmap(model)(x), grad)


def test_updates_of_equinox_raise():
    """`eqx.apply_updates` adds, and state must be overwritten: JAX's error names what
    does, by the type of a node.

    The gradient of a module is a module: the next state in place of the state, None for
    what is no array.
    """
    model, x, grad, state = setting()
    tx = jaxfp8.train.optimizer(optax.sgd(0.1))
    arrays = eqx.filter(model, eqx.is_array)
    gradient = eqx.filter_jit(eqx.filter_grad(loss_fn))(model, x, grad)
    expected = cases.one_product(x, np.asarray(model.kernel), grad, state)
    cases.assert_state(gradient.state, expected.state)
    expected.wgrad.check(gradient.kernel)
    assert gradient.activation is None and gradient.name is None
    updates, _ = tx.update(gradient, tx.init(arrays), arrays)
    with pytest.raises(ValueError, match="NeedsJaxfp8ApplyUpdates"):
        eqx.apply_updates(model, updates)
    updated = jaxfp8.train.apply_updates(model, updates)
    cases.assert_state(updated.state, expected.state)
    assert updated.activation is model.activation and updated.name == model.name


def test_leaves_without_a_gradient_may_come_first():
    """A whole model as `params`: its functions are leaves in front of the state, and
    the updates lack them.
    """
    model, x, grad, _ = setting()
    gradient = eqx.filter_grad(lambda pair: loss_fn(pair[1], x, grad))((model, model))
    tx = jaxfp8.train.optimizer(optax.sgd(0.1))
    opt_state = tx.init(eqx.filter((model, model), eqx.is_array))
    updates, _ = tx.update(gradient, opt_state, (model, model))
    _, updated = jaxfp8.train.apply_updates((model, model), updates)
    assert_same_bits(updated.state, gradient[1].state, "state")
    assert (updated.kernel != model.kernel).any()


@pytest.mark.parametrize(
    "jit",
    [lambda f: f, jax.jit, eqx.filter_jit],
    ids=["no jit", "jax.jit", "eqx.filter_jit"],
)
def test_a_checkpointed_loop_names_the_way_out(jit):
    """Such as that of diffrax's default adjoint; a `jit` around the loop hides where
    Equinox's assertion is from.
    """
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)

    @jit
    def solve(kernel, state, y):
        def body(carry):
            y, i = carry
            return jaxfp8.dot_general(
                y, kernel, cases.MATMUL, recipe=recipe, state=state
            ), i + 1

        return while_loop(
            lambda carry: carry[1] < 3,
            body,
            (y, jnp.int32(0)),
            max_steps=4,
            kind="checkpointed",
        )[0]

    gradient = jaxfp8.grad(lambda params: jnp.sum(solve(*params, jnp.ones((2, 16)))))
    with pytest.raises(
        TypeError, match=r"checkpointed loops.*adjoint=diffrax\.DirectAdjoint\(\)"
    ):
        gradient((jnp.eye(16), jaxfp8.init_state(recipe)))
