"""examples/equinox_layers.py: a layer is the oracle's product, a model keeps its
weights.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
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


def test_a_model_keeps_its_weights(example):
    """Each Linear becomes FP8, also inside of attention. A model of it trains on
    docs/clients.md.
    """
    keys = jax.random.split(jax.random.key(0))
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    model = (
        eqx.nn.MLP(16, "scalar", width_size=32, depth=1, key=keys[0]),
        eqx.nn.MultiheadAttention(2, 16, key=keys[1]),
    )
    mlp, attention = example.quantized(model, recipe)
    assert type(mlp.layers[0]) is type(attention.query_proj) is example.Fp8Linear
    assert type(mlp.layers[1]) is eqx.nn.Linear, "a scalar has no product"
    assert attention.query_proj.weight is model[1].query_proj.weight
