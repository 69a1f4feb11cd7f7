"""Whatever holds state, with counters and without: trees, optimizers, NNX models, checkpoints, exported programs.

The program of state without counters is the very program that there was before.
"""

import dataclasses
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import linen as nn, nnx, serialization

import jaxfp8
from jaxfp8.inspect import with_counters, without_counters

from .counter_cases import OPERANDS, OWG, RECIPE, K, M, N, counted_state, flat, structure, tensors, use


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(K, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(RECIPE))(x))
        x = nn.Dense(K, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(jaxfp8.Float8CurrentScaling()))(x)
        return nn.Dense(N)(x)


@pytest.fixture(scope="module")
def variables():
    return Mlp().init(jax.random.key(0), np.ones((M, K), np.float32))


def test_free_where_absent():
    """A tree from which counters were taken away gives the very program of one that never had any."""
    (x,), kernel, (grad,) = tensors()
    plain, counted = jaxfp8.init_state(RECIPE), counted_state()
    assert len(jax.tree.leaves(plain.input)) == 2

    def programs(state):
        jaxpr = str(jax.make_jaxpr(jax.grad(use, argnums=1))(kernel, state, x, grad))
        traced = jax.jit(jax.grad(use, argnums=1)).trace(kernel, state, x, grad)
        update = jax.jit(jaxfp8.update_state).lower(state, state).as_text()
        return [jaxpr, update, *(traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda"))]

    never, off, on = (programs(state) for state in (plain, without_counters(counted), counted))
    assert never == off and not any("count" in text for text in (never[0], *never[2:]))
    assert all(a != b for a, b in zip(never, on, strict=True))
    calls = [sorted(re.findall(r"@jaxfp8_\w+", text)) for text in (never[3], on[3])]
    assert calls[0] == calls[1] and on[0].count("jaxfp8_count_saturated_and_flushed") == 3


def test_only_what_is_asked_for():
    """The state decides for each quantizer."""
    (x,), kernel, (grad,) = tensors()
    state = dataclasses.replace(counted_state(), kernel=jaxfp8.init_state(RECIPE).kernel)
    got = jax.grad(use, argnums=1)(kernel, state, x, grad)
    assert got.kernel.counters is None and got.input.counters.shape == (3,)


def test_trees(variables):
    """Whatever holds state: counters beside each quantizer, nothing else changed, and gone again."""
    counted = with_counters(variables)
    names = {"/".join(path) for path in flat(counted).keys() - flat(variables).keys()}
    assert names == {f"{OWG}/Dense_0/Fp8DotGeneral_0/{name}_counters" for name in OPERANDS}
    assert structure(with_counters(counted)) == structure(counted)
    assert structure(without_counters(counted)) == structure(variables)
    assert flat(with_counters(variables[OWG])).keys() == flat(counted[OWG]).keys()
    frozen = with_counters(flax.core.freeze(variables))
    assert isinstance(frozen, flax.core.FrozenDict) and structure(frozen.unfreeze()) == structure(counted)
    shapes = with_counters(jax.eval_shape(lambda: variables))
    assert shapes[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"] == jax.ShapeDtypeStruct((3,), jnp.float32)
    tree = [counted_state(), (jaxfp8.init_state(RECIPE), 3)]
    assert structure(with_counters(tree)) == structure([counted_state(), (counted_state(), 3)])
    ones = jax.tree.map(jnp.ones_like, counted)
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(with_counters(ones))), "those that are there stay"
    with pytest.raises(ValueError, match=r"with_counters: input_scale: expected .* got shapes \(3,\) and \(2,\)"):
        with_counters({"input_amax_history": jnp.ones(3), "input_scale": jnp.ones(2)})


def test_nnx_models():
    """In place, with the optimizer that was made before; states as trees; a bridged Linen model."""
    dot_general = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
    model = nnx.Sequential(nnx.Linear(K, N, dot_general=dot_general, rngs=nnx.Rngs(0)), nnx.relu)
    before = nnx.state(model)
    optimizer = jaxfp8.nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9))
    with_counters(model), with_counters(optimizer)
    counters = model.layers[0].dot_general.input_counters
    assert type(counters) is jaxfp8.nnx.OverwriteWithGradient and counters.get_value().shape == (3,)
    x = tensors()[0][0]
    optimizer.update(model, jaxfp8.nnx.grad(lambda model: jnp.sum(model(x)))(model))
    assert model.layers[0].dot_general.input_counters.get_value()[2] == 1
    graph, state = nnx.split(model)
    again = with_counters(without_counters(state))
    assert structure(again) == structure(state) and structure(without_counters(state)) == structure(before)
    nnx.merge(graph, again)(x)
    assert structure(nnx.state(without_counters(model))) == structure(before)

    bridged = nnx.bridge.lazy_init(nnx.bridge.ToNNX(Mlp(), rngs=nnx.Rngs(0)), x)
    with_counters(bridged)
    jaxfp8.nnx.update_state(bridged, jaxfp8.nnx.grad(lambda model: jnp.sum(model(x)))(bridged))
    module = bridged.Dense_0["Fp8DotGeneral_0"]
    expected = oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size)
    oracle.assert_bitwise(module["input_counters"].get_value(), np.float32([*expected, 1]), "bridged")


@pytest.mark.parametrize("saved_with", [False, True])
@pytest.mark.parametrize("used_with", [False, True])
def test_checkpoints(variables, saved_with, used_with):
    """The program that runs now says whether there are counters; a checkpoint without them is as any was before."""
    plain = jax.tree.map(lambda leaf: leaf + 1, jaxfp8.init_state(RECIPE))
    counted = jax.tree.map(lambda leaf: leaf + 1, counted_state())
    target = counted_state() if used_with else jaxfp8.init_state(RECIPE)
    got = serialization.from_bytes(target, serialization.to_bytes(counted if saved_with else plain))
    assert structure(got) == structure(target)
    np.testing.assert_array_equal(got.input.scale, 2)
    if used_with:
        np.testing.assert_array_equal(got.input.counters, float(saved_with))
    assert set(serialization.to_state_dict(plain.input)) == {"amax_history", "scale"}

    model, saved = (with_counters(variables) if flag else variables for flag in (used_with, saved_with))
    assert flat(jaxfp8.convert.merge_state(model, saved)).keys() == flat(model).keys()
