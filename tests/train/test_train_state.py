"""linen.TrainState, and Flax's own with our layers: five steps and the bad days, bitwise against the replay."""

import functools

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax.core import freeze
from flax.training import train_state

import jaxfp8
from jaxfp8.linen._train_state import TrainState

from . import replay

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

BATCHES = [replay.batch(i) for i in range(8)]


@jax.jit
def advance(train, x, grad):
    return train.apply_gradients(grads=jax.grad(replay.loss)(train.params, x, grad))


def create(cls=TrainState, tx=None, params=None):
    tx = optax.adamw(1e-2, weight_decay=0.1) if tx is None else tx
    return cls.create(apply_fn=replay.LAYER.apply, params=replay.variables() if params is None else params, tx=tx)


@pytest.mark.parametrize("cls", [train_state.TrainState, TrainState])
def test_five_steps(cls):
    """Flax's class as it is, and ours: state as replayed, parameters trained, tx sees parameters only."""
    train = replay.run(advance, create(cls), lambda t: t.params, BATCHES, 5)
    assert train.step == 5
    assert {leaf.shape for leaf in jax.tree.leaves(train.opt_state)} == {(), (replay.K, replay.N)}


def test_gradient_through_a_layer_of_flax_names_the_way_out():
    layer, x = nn.Dense(4, dot_general_cls=nn.Fp8DotGeneral), np.ones((16, 32), np.float32)
    variables = layer.init(jax.random.key(0), x)
    with pytest.raises(TypeError, match="jaxfp8.Fp8DotGeneral in layers with Flax's own FP8"):
        jaxfp8.grad(lambda variables: jnp.sum(layer.apply(variables, x)))(variables)


def test_interchange_with_flax():
    """The same fields and the same optimizer state: checkpoints of one load into the other, and training agrees."""
    ours, theirs = create(), create(train_state.TrainState)
    for batch in BATCHES[:3]:
        ours, theirs = advance(ours, *batch), advance(theirs, *batch)
    same = functools.partial(oracle.assert_bitwise, what="leaf")
    jax.tree.map(same, flax.serialization.to_state_dict(ours), flax.serialization.to_state_dict(theirs))
    loaded = flax.serialization.from_bytes(create(), flax.serialization.to_bytes(theirs))
    jax.tree.map(same, advance(loaded, *BATCHES[3]).params, advance(theirs, *BATCHES[3]).params)


@pytest.mark.parametrize("wrap", [dict, freeze])
def test_other_collections_stay(wrap):
    """batch_stats and whatever else is there keeps its values, its place and its container."""
    extra = {"batch_stats": {"mean": np.float32([1, 2])}, "cache": {"index": np.int32(3)}}
    train = create(params=wrap({**replay.variables(), **extra}))
    step = jax.jit(
        lambda train, x, grad, **new: train.apply_gradients(
            grads=jax.grad(replay.loss)({k: train.params[k] for k in ("params", replay.OWG)}, x, grad), **new
        )
    )
    got = step(train, *BATCHES[0])
    assert jax.tree.structure(got.params) == jax.tree.structure(train.params)
    oracle.assert_bitwise(got.params["batch_stats"]["mean"], extra["batch_stats"]["mean"], "batch_stats")
    oracle.assert_bitwise(got.params["cache"]["index"], extra["cache"]["index"], "cache")
    replay.assert_state(got.params, replay.step(replay.first(), replay.kernel_of(train.params), BATCHES[:1]), "state")
    got = step(train, *BATCHES[0], batch_stats={"mean": np.float32([5, 6])})
    assert got.params["batch_stats"]["mean"].tolist() == [5, 6]


def test_gradients_of_other_collections_are_ignored():
    train = create(params={**replay.variables(), "batch_stats": {"mean": jnp.ones(2)}})
    grads = {**replay.gradient(train.params, *BATCHES[0])}
    assert "batch_stats" in grads
    grads["batch_stats"] = {"mean": jnp.full(2, 9.0)}
    assert train.apply_gradients(grads=grads).params["batch_stats"]["mean"].tolist() == [1, 1]


def test_gradients_of_parameters_alone():
    """State without a gradient stays as it is: inference scales, frozen calibration."""
    for tx in (optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 1)):
        train = advance(create(tx=tx), *BATCHES[0])
        grads = replay.gradient(train.params, *BATCHES[1])
        for given in ({"params": grads["params"]}, grads["params"]):
            got = train.apply_gradients(grads=given)
            assert not np.array_equal(replay.kernel_of(got.params), replay.kernel_of(train.params))
            for name, leaf in replay.state_of(train.params).items():
                oracle.assert_bitwise(replay.state_of(got.params)[name], leaf, name)
            assert jax.tree.structure(got) == jax.tree.structure(train)


def test_without_state_it_is_flax():
    layer = nn.Dense(3)
    for params in (lambda v: v, lambda v: v["params"]):
        variables = layer.init(jax.random.key(0), np.ones((2, 4), np.float32))
        results = []
        for cls in (TrainState, train_state.TrainState):
            train = cls.create(apply_fn=layer.apply, params=params(variables), tx=optax.adam(0.1))
            train = train.apply_gradients(grads=jax.tree.map(jnp.ones_like, train.params))
            results.append((train.params, train.opt_state))
        jax.tree.map(functools.partial(oracle.assert_bitwise, what="leaf"), *results)
