"""nnx.Experts: the bits of linen.Experts, in NNX's own training, and its rules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx
from linen.expert_cases import COUNT, F32, HIDDEN, HISTORY, WIDTH
from linen.test_experts import GATED, OWG, RECIPE, tokens

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import Experts, OverwriteWithGradient


def of_nnx(layer, seed=0):
    """The layer of NNX with the fields of a Linen layer."""
    names = {field.name for field in dataclasses.fields(layer)} - {"parent", "name"}
    fields = {name: getattr(layer, name) for name in names}
    return Experts(in_features=WIDTH, **fields, rngs=nnx.Rngs(seed))


def as_linen(model):
    """The variables of a model as Linen nests them."""
    params, state = (
        nnx.to_pure_dict(nnx.state(model, kind))
        for kind in (nnx.Param, OverwriteWithGradient)
    )
    variables = {"params": params}
    if state:
        variables[OWG] = {
            name: {"Fp8RaggedDot_0": tree["ragged_dot"]} for name, tree in state.items()
        }
    return variables


@pytest.mark.parametrize("dtype", [np.dtype(F32), oracle.BF16], ids=str)
def test_linen_and_nnx_agree(dtype):
    """Same fields, same parameters, same tree, same bits: two steps of SGD."""
    module = GATED.clone(dtype=dtype)
    model, (x, expert, weights) = of_nnx(module), tokens(5, dtype=dtype)
    variables = as_linen(model)
    shapes = jax.eval_shape(module.init, jax.random.key(0), x, expert, weights)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, variables)
    optimizer = jaxfp8.nnx.Optimizer(model, optax.sgd(0.125), wrt=nnx.Param)

    def loss_of(y):
        return jnp.sum(jnp.sin(y.astype(F32))), y

    @nnx.jit
    def step(model, optimizer):
        gradients, y = jaxfp8.nnx.grad(
            lambda model: loss_of(model(x, expert, weights)), has_aux=True
        )(model)
        optimizer.update(model, gradients)
        return y

    @jax.jit
    def linen_step(variables):
        gradients, y = jax.grad(
            lambda v: loss_of(module.apply(v, x, expert, weights)), has_aux=True
        )(variables)
        params = jax.tree.map(
            lambda p, g: p - F32(0.125) * g, variables["params"], gradients["params"]
        )
        return {"params": params, OWG: gradients[OWG]}, y

    for i in range(2):
        y = step(model, optimizer)
        variables, expected = linen_step(variables)
        assert_same_bits(y, expected, f"step {i}: y")
        assert_same_bits(as_linen(model), variables, f"step {i}: ")
        assert y.dtype == dtype


def test_scan_over_layers():
    """Stacked layers get stacked state from rules; each has the state of its layer
    alone.
    """
    x, expert, weights = tokens(5)

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return of_nnx(GATED.clone(recipe=jaxfp8.HighPrecision()), key)

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
    args, model = tokens(5), Model()
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
    args, model = tokens(5), Model(RECIPE)
    gradients = jaxfp8.nnx.grad(lambda model: jnp.sum(model(*args)))(model)
    jaxfp8.nnx.update_state(model, gradients)
    y = model(*args)
    frozen = jaxfp8.freeze(model, *args)
    assert not jax.tree.leaves(nnx.state(frozen, OverwriteWithGradient))
    assert_same_bits(frozen(*args), y, "frozen")


def test_bad_activation():
    with pytest.raises(ValueError, match='Experts: activation: expected one of "gelu"'):
        Experts(COUNT, WIDTH, HIDDEN, activation="tanh", rngs=nnx.Rngs(0))
