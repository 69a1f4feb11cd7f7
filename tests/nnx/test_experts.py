"""nnx.Experts: the bits of linen.Experts, in NNX's own training, and its rules."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY
from equality import assert_same_bits
from flax import nnx
from linen.expert_cases import COUNT, F32, HIDDEN, HISTORY, WIDTH
from linen.test_experts import GATED, RECIPE, tokens

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import Experts, OverwriteWithGradient

from .cases import compare_with_linen, of_nnx


@pytest.mark.parametrize("dtype", [np.dtype(F32), oracle.BF16], ids=str)
def test_linen_and_nnx_agree(dtype):
    compare_with_linen(GATED.clone(dtype=dtype), WIDTH, *tokens(5, dtype=dtype))


def test_stacked_layers():
    """They get stacked state from rules: a row for each layer, not for each expert."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return of_nnx(GATED.clone(recipe=jaxfp8.HighPrecision()), WIDTH, key)

    stack = make(jax.random.split(KEY, 2))
    jaxfp8.nnx.quantize(stack, [("w[io]", RECIPE)])
    for product in (stack.wi.ragged_dot, stack.wo.ragged_dot):
        assert product.kernel_amax_history.shape == (2, HISTORY)


class Model(nnx.Module):
    def __init__(self, recipe=None):
        self.experts = Experts(COUNT, WIDTH, HIDDEN, recipe=recipe, rngs=nnx.Rngs(0))

    def __call__(self, *args):
        return self.experts(*args)


def test_freeze():
    args = tokens(5)
    model = Model(RECIPE)
    gradients = jaxfp8.nnx.grad(lambda model: jnp.sum(model(*args)))(model)
    jaxfp8.nnx.update_state(model, gradients)
    y = model(*args)
    frozen = jaxfp8.freeze(model, *args)
    assert not jax.tree.leaves(nnx.state(frozen, OverwriteWithGradient))
    assert_same_bits(frozen(*args), y, "frozen")


def test_bad_activation():
    with pytest.raises(ValueError, match='Experts: activation: expected one of "gelu"'):
        Experts(COUNT, WIDTH, HIDDEN, activation="tanh", rngs=nnx.Rngs(0))
