"""Rules that make named layers of an NNX module one product: NNX's attention. Steps
are those of a GatedMLP, in `test_gated_rules.py`.
"""

import jax
import pytest
from draws import normal
from equality import assert_same_bits as assert_same
from flax import nnx

import jaxfp8
from jaxfp8.nnx import Linear, quantize

D = 6
X = normal(4, D)


class Model(nnx.Module):
    def __init__(self, qkv):
        self.qkv = qkv

    def __call__(self, x):
        return self.qkv(x)


def test_attention_of_nnx():
    def attention():
        return nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0))

    recipe = jaxfp8.StaticScaling(64.0, 64.0, 1.0)  # the scales of layers apart too
    qkv = Linear.of("query", "key", "value", recipe=recipe)
    model = quantize(Model(attention()), [("qkv", qkv), (".*", recipe)])
    apart = quantize(Model(attention()), [(".*", recipe)])
    assert_same(model(X), apart(X))
    with pytest.raises(ValueError, match="Attention: as one product: .* call of key"):
        jax.eval_shape(model.qkv, X, 2 * X)
