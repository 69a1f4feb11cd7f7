"""linen.TrainState, and Flax's own with our layers: five steps and the bad days,
bitwise against the replay.
"""

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from draws import KEY
from equality import assert_same_bits
from flax import nnx
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
    return cls.create(
        apply_fn=replay.LAYER.apply,
        params=replay.variables() if params is None else params,
        tx=tx,
    )


@pytest.mark.parametrize("cls", [train_state.TrainState, TrainState])
def test_five_steps(cls):
    """Flax's class as it is, and ours: state as replayed, parameters trained, tx sees
    parameters only.
    """
    train, state = create(cls), replay.first()
    for i, batch in enumerate(BATCHES[:5]):
        kernel = replay.kernel_of(train.params)
        train = advance(train, *batch)
        state = replay.step(state, kernel, [batch])
        replay.assert_state(train.params, state, f"step {i}")
        assert not np.array_equal(kernel, replay.kernel_of(train.params))
    assert train.step == 5
    assert {leaf.shape for leaf in jax.tree.leaves(train.opt_state)} == {
        (),
        (replay.K, replay.N),
    }


def test_gradient_through_a_layer_of_flax_names_the_way_out():
    layer = nn.Dense(4, dot_general_cls=nn.Fp8DotGeneral)
    x = np.ones((16, 32), np.float32)
    variables = layer.init(KEY, x)
    with pytest.raises(
        TypeError, match="jaxfp8.Fp8DotGeneral in layers with Flax's own FP8"
    ):
        jaxfp8.grad(lambda variables: jnp.sum(layer.apply(variables, x)))(variables)


def test_interchange_with_flax():
    """The same fields and the same optimizer state: checkpoints of one load into the
    other, and training agrees.
    """
    ours = create()
    theirs = create(train_state.TrainState)
    for batch in BATCHES[:3]:
        ours = advance(ours, *batch)
        theirs = advance(theirs, *batch)
    assert_same_bits(*map(flax.serialization.to_state_dict, (ours, theirs)))
    loaded = flax.serialization.from_bytes(
        create(), flax.serialization.to_bytes(theirs)
    )
    assert_same_bits(*(advance(t, *BATCHES[3]).params for t in (loaded, theirs)))


@pytest.mark.parametrize("wrap", [dict, freeze])
def test_other_collections_stay(wrap):
    """batch_stats and whatever else is there keeps its values, its place and its
    container.
    """
    extra = {
        "batch_stats": {"mean": np.float32([1, 2])},
        "cache": {"index": np.int32(3)},
    }
    train = create(params=wrap({**replay.variables(), **extra}))

    @jax.jit
    def step(train, x, grad, **new):
        trained = {name: train.params[name] for name in ("params", replay.OWG)}
        grads = dict(jax.grad(replay.loss)(trained, x, grad))
        grads["batch_stats"] = {"mean": jnp.full(2, 9.0)}  # ignored
        return train.apply_gradients(grads=grads, **new)

    got = step(train, *BATCHES[0])
    assert jax.tree.structure(got.params) == jax.tree.structure(train.params)
    oracle.assert_bitwise(
        got.params["batch_stats"]["mean"], extra["batch_stats"]["mean"], "batch_stats"
    )
    got = step(train, *BATCHES[0], batch_stats={"mean": np.float32([5, 6])})
    assert got.params["batch_stats"]["mean"].tolist() == [5, 6]


def test_gradients_of_parameters_alone():
    """State without a gradient stays as it is: inference scales, frozen calibration."""
    for tx in (optax.sgd(0.1), optax.MultiSteps(optax.sgd(0.1), 1)):
        train = advance(create(tx=tx), *BATCHES[0])
        grads = replay.gradient(train.params, *BATCHES[1])
        for given in ({"params": grads["params"]}, grads["params"]):
            got = train.apply_gradients(grads=given)
            assert not np.array_equal(
                replay.kernel_of(got.params), replay.kernel_of(train.params)
            )
            for name, leaf in replay.state_of(train.params).items():
                oracle.assert_bitwise(replay.state_of(got.params)[name], leaf, name)
            assert jax.tree.structure(got) == jax.tree.structure(train)


def test_without_state_it_is_flax():
    """Parameters alone are Flax's; of variables, `tx` sees the parameters, as it does
    with FP8 state.
    """
    layer = nn.Dense(3)
    variables = layer.init(KEY, np.ones((2, 4), np.float32))
    results = []
    for cls, params in (
        (TrainState, variables),
        (TrainState, variables["params"]),
        (train_state.TrainState, None),
    ):
        params = variables["params"] if params is None else params
        train = cls.create(apply_fn=layer.apply, params=params, tx=optax.adam(0.1))
        train = train.apply_gradients(grads=jax.tree.map(jnp.ones_like, train.params))
        results.append(
            (
                train.params["params"] if "params" in train.params else train.params,
                train.opt_state,
            )
        )
    for ours in results[:-1]:
        assert_same_bits(ours, results[-1])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.gelu(nn.Dense(16, name="up")(x)))


def test_an_nnx_module_is_refused():
    with pytest.raises(
        TypeError, match=r"create: params: .*NNX module Linear; .*jaxfp8.nnx.Optimizer"
    ):
        create_of(Block(), nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def create_of(model, params):
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
