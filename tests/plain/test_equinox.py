"""Equinox: FP8 state is a field of a module, and every filtered transform treats it right."""

import io
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_same_bits
from jax import lax
from programs.known_amax import used_state
from transforms import cases

import jaxfp8

BATCH = 3


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


def expected_step(model, x, grad, state):
    return cases.one_product(x, np.asarray(model.kernel), grad, state)


def advance(model, x, grad):
    """One step: the kernel by gradient descent, the state by overwriting."""
    grads = eqx.filter_grad(loss_fn)(model, x, grad)
    model = jaxfp8.update_state(model, grads)
    return eqx.tree_at(lambda m: m.kernel, model, model.kernel - 0.1 * grads.kernel)


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "filter_jit"])
@pytest.mark.parametrize("gradient", [eqx.filter_grad, eqx.filter_value_and_grad], ids=["grad", "value_and_grad"])
def test_filtered_gradients(gradient, jit):
    """The gradient of a module is a module: the next state in place of the state, None for what is no array."""
    model, x, grad, state = setting()
    grads = jit(gradient(loss_fn))(model, x, grad)
    grads = grads[1] if gradient is eqx.filter_value_and_grad else grads
    expected = expected_step(model, x, grad, state)
    cases.assert_state(grads.state, expected.state)
    expected.wgrad.check(grads.kernel)
    assert grads.activation is None and grads.name is None


def test_updates_of_equinox_raise():
    """`eqx.apply_updates` adds, and state must be overwritten: that it cannot is an error, not a wrong state."""
    model, x, grad, state = setting()
    tx = jaxfp8.train.optimizer(optax.sgd(0.1))
    arrays = eqx.filter(model, eqx.is_array)
    updates, _ = tx.update(eqx.filter_grad(loss_fn)(model, x, grad), tx.init(arrays), arrays)
    with pytest.raises(ValueError):
        eqx.apply_updates(model, updates)
    updated = jaxfp8.train.apply_updates(model, updates)
    cases.assert_state(updated.state, expected_step(model, x, grad, state).state)
    assert updated.activation is model.activation and updated.name == model.name


@pytest.mark.parametrize("vmap", [jax.vmap, eqx.filter_vmap])
def test_vmapped_vectors_are_one_product(vmap):
    """One forward and three in all, each of all rows; the state is that of the whole batch."""
    model, x, grad, state = setting()

    def forward(model_and_x):
        model, x = model_and_x
        return vmap(model)(x)

    gradient = eqx.filter_grad(lambda model_and_x: jnp.vdot(forward(model_and_x), grad))

    def sizes(function):
        with jaxfp8.ops.implementation("reference"):
            text = eqx.filter_jit(function).lower((model, x)).as_text()
        assert "stablehlo.while" not in text, "a loop would hide products"
        shapes = re.findall(r"stablehlo\.dot_general.*-> tensor<([0-9x]+)x\w+>", text)
        return sorted(int(np.prod([int(d) for d in shape.split("x")])) for shape in shapes)

    fprop, dgrad, wgrad = cases.ROWS * cases.N, cases.ROWS * cases.K, cases.K * cases.N
    assert sizes(forward) == [fprop]
    assert sizes(gradient) == sorted([fprop, dgrad, wgrad])
    grads, dx = gradient((model, jnp.asarray(x)))
    expected = expected_step(model, x, grad, state)
    cases.assert_state(grads.state, expected.state)
    expected.dgrad.check(dx)
    expected.wgrad.check(grads.kernel)


def test_a_layer_shared_in_two_places():
    """`eqx.nn.Shared` puts one layer, state and all, in two places of a model: one state, the max of both uses."""
    model, _, _, state = setting()
    x, _, grad = cases.operands(2)
    pair = eqx.nn.Shared((model, model), where=lambda pair: pair[1], get=lambda pair: pair[0])

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(pair):
        first, second = pair()
        return jnp.vdot(jax.vmap(first)(x[0]), grad[0]) + jnp.vdot(jax.vmap(second)(x[1]), grad[1])

    expected = expected_step(model, x, grad, state)
    got = gradient(pair).pytree[0]
    cases.assert_state(got.state, expected.state)
    expected.wgrad.check(got.kernel)


def test_remat():
    """A rematerialized layer, used twice."""
    model, _, _, state = setting()
    x, _, grad = cases.operands(2)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model):
        layer = eqx.filter_checkpoint(eqx.filter_vmap(model))
        return sum(jnp.vdot(layer(x[i]), grad[i]) for i in range(2))

    got, expected = gradient(model), expected_step(model, x, grad, state)
    cases.assert_state(got.state, expected.state)
    expected.wgrad.check(got.kernel)


@pytest.mark.parametrize("through", ["vmap", "scan"])
def test_stacked_modules(through):
    """An ensemble, or the layers of a scan: `eqx.filter_vmap` makes stacked state, one row for each member."""
    x, kernels, grads = cases.operands(BATCH, kernels=(BATCH,))
    states = [used_state(seed) for seed in range(BATCH)]
    models = eqx.filter_vmap(Linear)(kernels, cases.pack(states))
    arrays, rest = eqx.partition(models, eqx.is_array)

    def loss(arrays):
        if through == "vmap":
            return jnp.sum(eqx.filter_vmap(loss_fn)(eqx.combine(arrays, rest), x, grads))

        def body(total, xs):
            layer, x, grad = xs
            return total + loss_fn(eqx.combine(layer, rest), x, grad), None

        return lax.scan(body, jnp.float32(0), (arrays, x, grads))[0]

    got = eqx.filter_jit(jax.grad(loss))(arrays)
    steps = [cases.one_product(*member) for member in zip(x, kernels, grads, states, strict=True)]
    cases.assert_state(got.state, [step.state for step in steps])
    for i, step in enumerate(steps):
        step.wgrad.check(got.kernel[i], f"wgrad of member {i}")


def test_serialized_leaves():
    """Saved after two steps and loaded into a new model: the same bits, and so is the next step."""
    model, x, grad, _ = setting()
    for i in range(2):
        model = advance(model, x * np.float32(1 + i), grad)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, model)
    file.seek(0)
    fresh = Linear(jnp.zeros_like(model.kernel), jaxfp8.init_state(cases.RECIPE))
    loaded = eqx.tree_deserialise_leaves(file, fresh)

    def assert_same(*models):
        assert_same_bits(*(jax.tree.leaves(eqx.filter(model, eqx.is_array)) for model in models), "after loading")

    assert any(leaf[0] > 0 for leaf in jax.tree.leaves(model.state)) and not np.any(fresh.state.input.amax_history)
    assert_same(loaded, model)
    assert_same(advance(loaded, 3 * x, grad), advance(model, 3 * x, grad))
