"""examples/equinox_layers.py: a layer is the oracle's product, a model keeps its
weights.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from programs import cases
from programs.known_amax import used_state

import jaxfp8

NAME = "equinox_layers"


def test_a_layer_is_one_product(example):
    x, kernel, grad = cases.operands()
    state = used_state(0)
    layer = example.Fp8Linear(
        jnp.asarray(kernel.T), None, cases.pack(state), cases.RECIPE
    )
    gradient = eqx.filter_grad(lambda layer: jnp.vdot(jax.vmap(layer)(x), grad))(layer)
    expected = cases.one_product(x, kernel, grad, state)
    cases.assert_state(gradient.state, expected.state)
    expected.wgrad.check(gradient.weight.T)


def test_a_model_trains(example):
    """Each Linear becomes FP8, also inside of attention; weights are those of the
    model.
    """
    keys = jax.random.split(jax.random.key(0))
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    model = (
        eqx.nn.MLP(16, "scalar", width_size=32, depth=1, key=keys[0]),
        eqx.nn.MultiheadAttention(2, 16, key=keys[1]),
    )
    mlp, attention = fp8 = example.quantized(model, recipe)
    assert type(mlp.layers[0]) is type(attention.query_proj) is example.Fp8Linear
    assert type(mlp.layers[1]) is eqx.nn.Linear, "a scalar has no product"
    assert attention.query_proj.weight is model[1].query_proj.weight

    x = jax.random.normal(jax.random.key(1), (8, 16))
    tx = jaxfp8.train.optimizer(optax.adam(1e-2))
    opt_state = tx.init(eqx.filter(fp8, eqx.is_inexact_array))

    def loss_fn(model):
        mlp, attention = model
        return jnp.mean(jax.vmap(mlp)(attention(x, x, x)) ** 2)

    losses = []
    for _ in range(5):
        loss, gradient = eqx.filter_value_and_grad(loss_fn)(fp8)
        updates, opt_state = tx.update(gradient, opt_state, fp8)
        fp8 = jaxfp8.train.apply_updates(fp8, updates)
        losses.append(loss)
    assert losses[-1] < losses[0]
