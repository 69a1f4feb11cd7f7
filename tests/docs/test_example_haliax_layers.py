"""examples/haliax_layers.py: state of single and stacked layers, stored by haliax and
by jaxfp8.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from equality import assert_same_bits

import jaxfp8

# haliax 1.3 fails to import with JAX 0.10.2.
hax = pytest.importorskip("haliax", exc_type=ImportError)
eqx = pytest.importorskip("equinox")

NAME = "haliax_layers"
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
BATCH, IN, OUT, DEPTH = (
    hax.Axis(name, size)
    for name, size in (("batch", 8), ("in", 16), ("out", 32), ("depth", 3))
)


class Block(eqx.Module):
    layer: hax.nn.Linear

    @staticmethod
    def init(*, key):
        return Block(hax.nn.Linear.init(IN, IN.alias("again"), key=key))

    def __call__(self, x):
        return x + self.layer(x).rename({"again": "in"})


def loss_fn(model, x):
    return hax.mean(model(x) ** 2).scalar()


@pytest.mark.parametrize("out_first", [False, True])
def test_a_layer_stores_its_state(example, out_first):
    keys = jax.random.split(jax.random.key(0))
    layer = hax.nn.Linear.init(IN, OUT, key=keys[0], out_first=out_first)
    x = hax.random.normal(keys[1], (BATCH, IN))
    fp8 = example.quantized(layer, RECIPE)
    assert fp8.weight is layer.weight
    gradient = eqx.filter_grad(loss_fn)(fp8, x)
    state = gradient.dot_general.state
    assert state.input.amax_history[0] == jnp.max(jnp.abs(x.array))
    assert state.kernel.amax_history[0] == jnp.max(jnp.abs(layer.weight.array))

    arrays = eqx.filter(fp8, eqx.is_inexact_array)
    tx = optax.sgd(0.1)
    overwrites, rest = hax.quantization.partition_for_grad_overwrite(gradient)
    updates, _ = tx.update(rest, tx.init(arrays))
    by_haliax = hax.quantization.apply_updates(fp8, updates, overwrites)
    tx = jaxfp8.train.optimizer(tx)
    updates, _ = tx.update(gradient, tx.init(arrays), fp8)
    by_jaxfp8 = jaxfp8.train.apply_updates(fp8, updates)
    for model in (by_haliax, by_jaxfp8):
        assert_same_bits(model.dot_general.state, state, "state")
        assert (model.weight.array != layer.weight.array).any()


def test_stacked_layers_have_a_state_each(example):
    keys = jax.random.split(jax.random.key(0), DEPTH.size)
    model = hax.nn.Stacked.init(DEPTH, Block)(key=keys)
    x = hax.random.normal(jax.random.key(1), (BATCH, IN))
    fp8 = example.quantized(model, RECIPE)
    gradient = eqx.filter_grad(lambda model: loss_fn(model.fold, x))(fp8)
    history = gradient.stacked.layer.dot_general.state.input.amax_history
    assert history.shape == (3, 4)
    assert history[0, 0] == jnp.max(jnp.abs(x.array)) and (history[:, 0] > 0).all()
