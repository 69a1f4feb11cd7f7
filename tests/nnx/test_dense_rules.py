"""Rules that make named layers of an NNX module one product: the numbers of one Linear
over all kernels; NNX's attention.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_same_bits as assert_same
from flax import nnx

import jaxfp8
from jaxfp8.nnx import Linear, quantize

RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)
NAMES = "query", "key", "value"
D, FEATURES = 6, {"query": (4, 2), "key": 4, "value": 4}
X = np.random.default_rng(0).standard_normal((4, D)).astype(np.float32)
QKV = Linear.of(*NAMES, recipe=RECIPE)


class Projections(nnx.Module):
    """q, k and v of grouped queries, side by side."""

    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "use_bias": False, "rngs": rngs}
        self.query = nnx.LinearGeneral(D, FEATURES["query"], **options)
        self.key = nnx.Linear(D, FEATURES["key"], **options)
        self.value = nnx.Linear(D, FEATURES["value"], **options)

    def __call__(self, x):
        query = self.query(x, out_sharding=None)
        return jnp.concatenate(
            [query.reshape(*x.shape[:-1], -1), self.key(x), self.value(x)], -1
        )


class Model(nnx.Module):
    def __init__(self, qkv):
        self.qkv = qkv

    def __call__(self, x):
        return self.qkv(x)


def side_by_side(model):
    """The kernels as that of one layer."""
    query, key, value = (getattr(model.qkv, name).kernel[...] for name in NAMES)
    return jnp.concatenate([query.reshape(D, -1), key, value], -1)


@nnx.jit
def step(model, optimizer):
    def loss(model):
        return jnp.sum(jnp.sin(model(X).astype(jnp.float32)))

    value, gradients = jaxfp8.nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def states(linear):
    return nnx.to_pure_dict(nnx.state(linear, jaxfp8.nnx.OverwriteWithGradient))


def test_numbers_are_those_of_one_linear():
    """Over two steps, with the state and the names of the layers."""
    model = Model(Projections(nnx.Rngs(0)))
    before = set(nnx.to_flat_state(nnx.state(model, nnx.Param)).paths)
    quantize(model, [("qkv", QKV)])
    assert before == set(nnx.to_flat_state(nnx.state(model, nnx.Param)).paths)
    linear = nnx.Linear(D, 16, use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    one = quantize(Model(linear), [("qkv", RECIPE)])
    one.qkv.kernel[...] = side_by_side(model)
    optimizers = [jaxfp8.nnx.Optimizer(each, optax.sgd(0.1)) for each in (model, one)]
    for _ in range(2):
        losses = [step(*each) for each in zip((model, one), optimizers, strict=True)]
        assert_same(*losses)
        assert_same(side_by_side(model), one.qkv.kernel[...])
        for name in NAMES:
            assert_same(states(getattr(model.qkv, name)), states(one.qkv))


def test_attention_of_nnx():
    def attention():
        return nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0))

    recipe = jaxfp8.StaticScaling(64.0, 64.0, 1.0)  # the scales of layers apart too
    qkv = Linear.of(*NAMES, recipe=recipe)
    model = quantize(Model(attention()), [("qkv", qkv), (".*", recipe)])
    apart = quantize(Model(attention()), [(".*", recipe)])
    assert_same(model(X), apart(X))
    rows = jaxfp8.report(model, X, strict=True).rows
    told = {row["layer"]: row["why"] for row in rows}
    for name in NAMES:
        assert told[f"qkv/{name}"] == "rule 0 'qkv' as one product"
    with pytest.raises(ValueError, match="Attention: as one product: .* call of key"):
        jax.eval_shape(model.qkv, X, 2 * X)
