"""nnx.Experts: the bits of linen.Experts, in NNX's own training, and its rules."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx
from linen.expert_cases import COUNT, F32, HIDDEN, HISTORY, WIDTH
from linen.test_experts import GATED, OWG, RECIPE, tokens

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import Experts, OverwriteWithGradient

from .cases import as_linen, compare_with_linen, of_nnx


@pytest.mark.parametrize("dtype", [np.dtype(F32), oracle.BF16], ids=str)
def test_linen_and_nnx_agree(dtype):
    compare_with_linen(GATED.clone(dtype=dtype), WIDTH, *tokens(5, dtype=dtype))


def test_scan_over_layers():
    """Stacked layers get stacked state from rules; each has the state of its layer
    alone.
    """
    x, expert, weights = tokens(5)

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return of_nnx(GATED.clone(recipe=jaxfp8.HighPrecision()), WIDTH, key)

    stack = make(jax.random.split(jax.random.key(0), 2))
    assert not jax.tree.leaves(nnx.state(stack, OverwriteWithGradient))
    jaxfp8.nnx.quantize(stack, [("w[io]", RECIPE)])
    layers = [
        jax.tree.map(lambda a: a[i], as_linen(stack))  # noqa: B023
        for i in range(2)
    ]

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(y, layer):
        return y + layer(y, expert, weights)

    def unrolled(layers):
        y = x
        for layer in layers:
            y = y + GATED.apply(layer, y, expert, weights)
        return jnp.sum(y**2)

    grad = jaxfp8.nnx.grad(lambda stack: jnp.sum(run(x, stack) ** 2))
    jaxfp8.nnx.update_state(stack, nnx.jit(grad)(stack))
    expected = jax.jit(jax.grad(unrolled))(layers)
    for i in range(2):
        got = jax.tree.map(lambda a: a[i], as_linen(stack)[OWG])  # noqa: B023
        assert_same_bits(got, expected[i][OWG], f"layer {i}")


class Model(nnx.Module):
    def __init__(self, recipe=None):
        self.experts = Experts(COUNT, WIDTH, HIDDEN, recipe=recipe, rngs=nnx.Rngs(0))

    def __call__(self, *args):
        return self.experts(*args)


def test_rules_and_report():
    args = tokens(5)
    model = Model()
    jaxfp8.nnx.quantize(model, [("experts/wi", None), (".*/wo", RECIPE)])
    rows = {row["layer"]: row for row in jaxfp8.report(model, *args).rows}
    assert {path: row["recipe"] for path, row in rows.items()} == {
        "experts/wi": None,
        "experts/wo": RECIPE,
    }
    assert rows["experts/wo"]["input"] == (10, HIDDEN)
    assert rows["experts/wo"]["kernel"] == (COUNT, HIDDEN, WIDTH)
    state = nnx.to_pure_dict(nnx.state(model, OverwriteWithGradient))["experts"]
    assert set(state) == {"wo"}
    history = state["wo"]["ragged_dot"]["input_amax_history"]
    assert history.shape == (HISTORY,)
    model(*args)


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
