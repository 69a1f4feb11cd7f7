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
from equality import assert_same_bits
from flax import nnx
from flax.core import freeze
from flax.training import train_state

import jaxfp8
from jaxfp8.linen._train_state import TrainState

from . import replay

KEY = jax.random.key(0)

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
    train = replay.run(advance, create(cls), lambda t: t.params, BATCHES, 5)
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
    step = jax.jit(
        lambda train, x, grad, **new: train.apply_gradients(
            grads=jax.grad(replay.loss)(
                {k: train.params[k] for k in ("params", replay.OWG)}, x, grad
            ),
            **new,
        )
    )
    got = step(train, *BATCHES[0])
    assert jax.tree.structure(got.params) == jax.tree.structure(train.params)
    oracle.assert_bitwise(
        got.params["batch_stats"]["mean"], extra["batch_stats"]["mean"], "batch_stats"
    )
    oracle.assert_bitwise(
        got.params["cache"]["index"], extra["cache"]["index"], "cache"
    )
    replay.assert_state(
        got.params,
        replay.step(replay.first(), replay.kernel_of(train.params), BATCHES[:1]),
        "state",
    )
    got = step(train, *BATCHES[0], batch_stats={"mean": np.float32([5, 6])})
    assert got.params["batch_stats"]["mean"].tolist() == [5, 6]


def test_gradients_of_other_collections_are_ignored():
    train = create(params={**replay.variables(), "batch_stats": {"mean": jnp.ones(2)}})
    grads = {**replay.gradient(train.params, *BATCHES[0])}
    assert "batch_stats" in grads
    grads["batch_stats"] = {"mean": jnp.full(2, 9.0)}
    assert train.apply_gradients(grads=grads).params["batch_stats"][
        "mean"
    ].tolist() == [1, 1]


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


DELAYED = [(".*", jaxfp8.DelayedScaling(amax_history_len=4))]
RULES = {
    "delayed": DELAYED,
    "current": [(".*", jaxfp8.Float8CurrentScaling())],
    "bf16": [],
}


# Of the parameters, whatever the recipe.
LABELS = {name: {"kernel": "trains", "bias": "trains"} for name in ("up", "down")}


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.multi_transform({"trains": optax.adam(0.1)}, LABELS),
    ],
    ids=["MultiSteps", "multi_transform"],
)
def test_optimizer_state_outlives_the_recipe(tx):
    """From delayed to current scaling, to bf16 and back: the moments and counts go on;
    those of a plain optimizer in test_change_of_recipe.py.
    """
    x = np.ones((4, 8), np.float32)
    models = {
        name: jaxfp8.quantize(Block(), rules) if rules else Block()
        for name, rules in RULES.items()
    }
    variables = models["delayed"].init(KEY, x)
    opt_state, steps = None, 0
    for name in ("delayed", "current", "bf16", "delayed", "delayed"):
        fresh = models[name].init(KEY, x)
        variables = {**fresh, "params": variables["params"]}
        train = TrainState.create(apply_fn=models[name].apply, params=variables, tx=tx)
        assert set(train.params) == set(variables)
        train = train if opt_state is None else train.replace(opt_state=opt_state)

        @jax.jit
        def step(train):
            return train.apply_gradients(
                grads=jax.grad(lambda v: jnp.sum(train.apply_fn(v, x) ** 2))(
                    train.params
                )
            )

        for _ in range(2):
            train = step(train)
            steps = steps + 1
        counts = [
            int(leaf)
            for leaf in jax.tree.leaves(train.opt_state)
            if leaf.dtype == np.int32
        ]
        assert steps // (2 if isinstance(tx, optax.MultiSteps) else 1) in counts
        variables, opt_state = train.params, train.opt_state


def test_parameters_alone_of_a_model_with_state_are_said():
    model = jaxfp8.quantize(Block(), DELAYED)
    params = model.init(KEY, np.ones((4, 8), np.float32))["params"]
    with pytest.warns(
        jaxfp8.FP8StateWarning,
        match=r"create: params: expected all variables.*params=variables",
    ):
        create_of(model, params)
    # warnings are errors here
    create_of(jaxfp8.quantize(Block(), RULES["current"]), params)
    create_of(Block(), params)
    with pytest.raises(
        TypeError, match=r"create: params: .*NNX module Linear; .*jaxfp8.nnx.Optimizer"
    ):
        create_of(model, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def create_of(model, params):
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))


def test_two_losses_of_one_point():
    """Two gradients at one state, stored one after the other: one history entry, the
    larger amax.
    """
    train = create(tx=optax.sgd(0.0))
    state = oracle.LayerState.init(replay.HISTORY)
    step = jax.jit(lambda train, grads: train.apply_gradients(grads=grads))
    for i in range(2):  # also from a history that is not empty
        batches = BATCHES[2 * i : 2 * i + 2]
        variables = train.params
        state = replay.step(state, replay.kernel_of(variables), batches)
        for batch in batches:
            train = step(train, replay.gradient(variables, *batch))
        replay.assert_state(train.params, state, f"step {i}")


@pytest.mark.parametrize("how", ["TrainState", "train.optimizer"])
def test_a_step_has_no_effects(how):
    """An effect in the program turns off the fast path of jit, and jax.export refuses
    it.
    """
    pytest.importorskip("flatbuffers")
    tx = optax.adam(0.1)
    if how == "TrainState":
        step = advance
        state = create(tx=tx)
    else:
        ours = jaxfp8.train.optimizer(tx)
        state = replay.variables(), ours.init(replay.variables())

        @jax.jit
        def step(state, x, grad):
            variables, opt_state = state
            updates, opt_state = ours.update(
                jax.grad(replay.loss)(variables, x, grad), opt_state, variables
            )
            return optax.apply_updates(variables, updates), opt_state

    assert not step.trace(state, *BATCHES[0]).jaxpr.effects
    leaves, treedef = jax.tree.flatten(state)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in jaxfp8.ops.custom_call_targets()
    ]
    flat = jax.jit(
        lambda leaves, x, grad: jax.tree.leaves(
            step(treedef.unflatten(leaves), x, grad)
        )
    )
    exported = jax.export.export(flat, disabled_checks=checks)(leaves, *BATCHES[0])
    got = jax.export.deserialize(exported.serialize()).call(leaves, *BATCHES[0])
    assert_same_bits(got, flat(leaves, *BATCHES[0]))
