"""Delayed scaling in MaxText's grouped products, on the stand-in of `test_maxtext.py`:
the state of devices is that of one device, bit for bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_mesh import mesh_of
from equality import assert_same_bits
from flax import nnx
from jax import lax
from parametrize import each_row
from programs.cases import stacked
from programs.known_amax import named

import jaxfp8
from integrations.test_maxtext import quantization, standin as standin
from jaxfp8.integrations import maxtext
from jaxfp8.nnx import OverwriteWithGradient

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
TOKENS, WIDTH, HIDDEN, EXPERTS = 64, 32, 48, 3
STEPS = 2
PRODUCTS = "wi_0", "wi_1", "wo"


@dataclasses.dataclass
class Config:
    prefuse_moe_weights: bool = False
    num_moe_token_chunks: int = 1


class Decoder(nnx.Module):
    """A scan over layers, each rematerialized or not."""

    def __init__(self, layers, is_remat):
        self.layers, self.is_remat = layers, is_remat

    def __call__(self, x, expert):
        graphdef, layers = nnx.split(self.layers)

        def layer(x, state):
            return nnx.merge(graphdef, state).sparse_matmul(x, expert), None

        return lax.scan(jax.checkpoint(layer) if self.is_remat else layer, x, layers)[0]


def kernels(layers):
    """Of each layer `[experts, k, n]`, stacked."""
    rng = np.random.default_rng(0)
    wi = EXPERTS, WIDTH, HIDDEN
    shapes = wi, wi, (EXPERTS, HIDDEN, WIDTH)
    return [
        jnp.asarray(rng.standard_normal((layers, *shape)) / 4, jnp.float32)
        for shape in shapes
    ]


def batch(step):
    """Tokens, and the expert of each; the largest lie on another device in each
    step.
    """
    rng = np.random.default_rng(10 + step)
    size = 2.0 ** np.roll(np.arange(8.0), 3 * step).repeat(TOKENS // 8)
    x = rng.standard_normal((TOKENS, WIDTH)) * size[:, None] / 64
    return jnp.asarray(x, jnp.float32), jnp.asarray(rng.integers(0, EXPERTS, TOKENS))


def loss_fn(model, config, data, dropout_rng=None, params=None, is_train=True):
    del config, dropout_rng, params, is_train
    return jnp.sum(model(*data) ** 2), {}


@functools.cache
def by_hand(layers=2, is_fused=False):
    """The state after each of STEPS steps, of products that are written down for one
    device.
    """

    def loss(state, x, expert):
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=EXPERTS).astype(jnp.int32)

        def layer(x, of_layer):
            (wi_0, wi_1, wo), state = of_layer

            def dot(x, kernel, name):
                return jaxfp8.ragged_dot(
                    x, kernel, sizes, recipe=RECIPE, state=state[name]
                )

            x = x[order]
            if is_fused:
                both = dot(x, jnp.concatenate([wi_0, wi_1], -1), "wi_0")
                gate, up = jnp.split(both, 2, axis=1)
            else:
                gate, up = dot(x, wi_0, "wi_0"), dot(x, wi_1, "wi_1")
            return dot(gate * up, wo, "wo")[jnp.argsort(order)], None

        y, _ = lax.scan(layer, x, (kernels(layers), state))
        return jnp.sum(y**2)

    gradient = jax.jit(jax.grad(loss))
    state = dict.fromkeys(PRODUCTS, jaxfp8.init_state(RECIPE))
    state = stacked(state, layers)
    states = []
    for step in range(STEPS):
        state = jaxfp8.update_state(state, gradient(state, *batch(step)))
        states.append({name: named(state[name]) for name in PRODUCTS})
    return states


def decoder(standin, mesh, layers=2, is_remat=False, **config):
    """A model with stacked layers."""

    @nnx.vmap
    def stacked(kernels):
        return standin.moe.RoutedMoE(
            quantization(standin), Config(**config), mesh, kernels
        )

    return Decoder(stacked(kernels(layers)), is_remat)


def train(standin, model):
    """Return the state after STEPS steps."""
    graphdef, state, rest = nnx.split(model, OverwriteWithGradient, ...)

    @jax.jit
    @jax.grad
    def gradient(state, data):
        loss, _ = standin.train.loss_fn(nnx.merge(graphdef, state, rest), None, data)
        return loss

    for step in range(STEPS):
        state = jaxfp8.update_state(state, gradient(state, batch(step)))
    return state


def of_products(state):
    of_layers = nnx.to_pure_dict(state)["layers"]["quant_einsums"]
    return {name: of_layers[name]["fp8_einsum"] for name in PRODUCTS}


def compare(standin, fsdp, tensor=1, layers=2, is_remat=False, **config):
    standin.train.loss_fn = loss_fn
    with maxtext.install(RECIPE):
        mesh = mesh_of(fsdp=fsdp, tensor=tensor)
        model = decoder(standin, mesh, layers, is_remat, **config)
        got = of_products(train(standin, model))
    states = by_hand(layers, config.get("prefuse_moe_weights", False))
    assert_same_bits(got, states[-1])
    assert standin.moe.jax is jax


PROGRAMS = {
    "eight, remat of chunks": {
        "fsdp": 8,
        "is_remat": True,
        "num_moe_token_chunks": 2,
    },
    # A second layer would see sums over devices, in another order.
    "two for each row, fused kernels": {
        "fsdp": 4,
        "tensor": 2,
        "layers": 1,
        "prefuse_moe_weights": True,
    },
}


@each_row("program", PROGRAMS)
def test_state_of_devices(standin, program, recwarn):
    compare(standin, **program)
    assert not recwarn.list


@pytest.mark.parametrize("axis", ["stage", "diloco"])
def test_axes_that_are_refused(standin, axis):
    maxtext.install(RECIPE)
    model = decoder(standin, mesh_of(fsdp=2, tensor=1, **{axis: 2}))
    with pytest.raises(ValueError, match="_parallelism: expected 1 for experts with"):
        model(*batch(0))
    assert standin.moe.jax is jax


def test_a_recipe_without_state(standin):
    maxtext.install(jaxfp8.Float8CurrentScaling())
    model = decoder(standin, mesh_of(fsdp=4, tensor=1))
    x, expert = batch(0)
    assert jax.eval_shape(model, x, expert).shape == x.shape
