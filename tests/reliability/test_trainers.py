"""Trainers: state that something reached anyway, means over devices, gradients of parameters alone."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax.training import dynamic_scale, train_state
from jax.sharding import AxisType, PartitionSpec as P
from train import replay
from train.conftest import promotion_as_optax_wants as promotion_as_optax_wants

import jaxfp8

from .cases import (
    OPERANDS,
    OWG,
    ROUND,
    assert_same_bits,
    assert_state,
    dense,
    in_two_octaves,
    is_right,
    normal,
    products_are_right,
    state_of,
    step_of,
    variables_of,
)

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

# ------------------------------------------------------------------------------------------------- what slips through

# What trainers do to a tree of gradients or variables, done to state that was right.
SLIPPED = {
    "unscaled by 65536": lambda leaf: leaf / 65536,
    "clipped": lambda leaf: leaf * 0.0317,
    "averaged over 8": lambda leaf: leaf / 8,
    "summed over 3 uses": lambda leaf: leaf * 3,
    "weight decay": lambda leaf: leaf * 0.9,
    "gradient descent": lambda leaf: leaf - 0.1 * np.roll(leaf, -1),
    "ascent past zero": lambda leaf: -leaf,
    "cast to bfloat16": lambda leaf: leaf.astype(oracle.BF16),
    "cast to float16": lambda leaf: leaf.astype(oracle.F16),
    "set to zero": lambda leaf: leaf * 0,
    "divided by zero": lambda leaf: leaf / np.zeros_like(leaf),
    "not a number": lambda leaf: leaf * np.nan,
}
SIZES = {"ordinary": (1.0, 1.0), "data of 1e5, gradients of 1e-7": (1e5, 1e-7)}


@pytest.mark.parametrize("data, grads", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("slip", SLIPPED.values(), ids=SLIPPED)
def test_what_slips_through(slip, data, grads):
    """Read without a NaN, to the bit as numpy reads it; one good step later all products are right.

    Where a stored scale of 0 is divided by, as in Flax, the run is NaN from here on.
    """
    step = step_of(dense(8))

    def operands(i):
        kernel = in_two_octaves(3 * i + 1, (24, 8), 1)
        return in_two_octaves(3 * i, (16, 24), data), kernel, in_two_octaves(3 * i + 2, (16, 8), grads)

    def advance(variables, i):
        x, kernel, grad = operands(i)
        variables = {**variables, "params": {"kernel": kernel}}
        got = step(variables, x, grad)
        return got, jaxfp8.update_state(variables, got.variables)

    variables = variables_of(operands(0)[1])
    for i in range(3):
        good, variables = advance(variables, i)
    assert products_are_right(good, *operands(2)) == [True] * 3

    with np.errstate(all="ignore"):
        slipped = jax.tree.map(lambda leaf: np.asarray(slip(np.asarray(leaf)), np.float32), variables[OWG])
    variables = {**variables, OWG: slipped}
    state = oracle.LayerState(*(state_of(variables, operand) for operand in OPERANDS))
    bad, variables = advance(variables, 3)
    x, kernel, grad = operands(3)
    assert_state(variables, oracle.dense_step(x, kernel, grad, state).state, "the step after")
    assert all(np.isfinite(product).all() for product in bad[:3])

    good, variables = advance(variables, 4)
    assert products_are_right(good, *operands(4)) == [True] * 3


def bare_sgd(helped):
    """optax on the whole tree: state becomes `old - lr * new`, its amaxes are negative, its scale goes to 0."""
    tx = optax.sgd(0.1)
    tx = jaxfp8.train.optimizer(tx) if helped else tx

    def advance(train, x, grad):
        updates, _ = tx.update(jax.grad(replay.loss)(train, x, grad), tx.init(train), train)
        return optax.apply_updates(train, updates)

    return replay.variables(), advance, lambda train: train


def loss_scale(helped):
    """Flax's DynamicScale divides the whole tree by 65536, and Flax's TrainState stores what it is given."""
    cls = jaxfp8.linen.TrainState if helped else train_state.TrainState
    train = cls.create(apply_fn=replay.LAYER.apply, params=replay.variables(), tx=optax.sgd(0.1))
    scaler = dynamic_scale.DynamicScale(scale=65536.0)

    def advance(train, x, grad):
        *_, grads = scaler.value_and_grad(lambda v: replay.loss(v, x, grad))(train.params)
        return train.apply_gradients(grads=grads)

    return train, advance, lambda train: train.params


UNSEEN = pytest.mark.xfail(
    strict=True, reason="a product cannot tell state that is right from state that was scaled as a whole"
)


@pytest.mark.parametrize("make", [bare_sgd, loss_scale], ids=["bare SGD", "DynamicScale"])
@pytest.mark.parametrize("helped", [True, pytest.param(False, marks=UNSEEN)], ids=["with helper", "without"])
def test_products_after_a_hundred_steps(make, helped):
    """With our optimizer or TrainState the products are right; without it, nobody says that they are not."""
    train, advance, variables_in = make(helped)
    advance, x, grad = (
        jax.jit(advance),
        in_two_octaves(0, (replay.M, replay.K), 1),
        normal(1, (replay.M, replay.N), 1e-4),
    )
    for _ in range(100):
        train = advance(train, x, grad)
    y, kernel = replay.LAYER.apply(variables_in(train), x), replay.kernel_of(variables_in(train))
    assert is_right(y, x, kernel, ROUND["input"], ROUND["kernel"])


# ------------------------------------------------------------------------------------------------- clipping, decay


def test_clipping_and_decay_in_our_train_state():
    """Amaxes of 1e4 are not in the norm that is clipped, decay does not shrink them: parameters as by optax alone."""
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2, weight_decay=0.5))
    train = jaxfp8.linen.TrainState.create(apply_fn=replay.LAYER.apply, params=replay.variables(), tx=tx)
    params, opt_state = train.params["params"], tx.init(train.params["params"])
    advance = jax.jit(lambda train, grads: train.apply_gradients(grads=grads))
    state = replay.first()
    for i in range(5):
        x, grad = replay.batch(i, 1e4)
        grads = replay.gradient(train.params, x, grad)
        updates, opt_state = tx.update(grads["params"], opt_state, params)
        params = optax.apply_updates(params, updates)
        state = replay.step(state, replay.kernel_of(train.params), [(x, grad)])
        train = advance(train, grads)
        replay.assert_state(train.params, state, f"step {i}")
        # Compiled and not: a few roundings of 2**-24 apart in each of five steps.
        np.testing.assert_allclose(replay.kernel_of(train.params), params["kernel"], rtol=1e-5, atol=1e-6)
        params = train.params["params"]


# ------------------------------------------------------------------------------------------------- means over devices

DEVICES = 8


# No axis is a pipeline's, but with check_vma=False nobody said so.
UNTOLD = pytest.mark.filterwarnings("ignore::jaxfp8.FP8StateWarning")


def mean_of_gradients(check_vma):
    """A data-parallel step as people write it: the whole tree of gradients through `pmean`, then the update."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def step(variables, x, grad):
        gradient = jax.lax.pmean(jax.grad(replay.loss)(variables, x, grad), "data")
        return jaxfp8.update_state(variables, gradient)

    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=check_vma)
    )


def rows_of_all(step):
    """x and grad of all devices; no two have the same amaxes."""
    return tuple(map(np.concatenate, zip(*(replay.batch(DEVICES * step + i) for i in range(DEVICES)), strict=True)))


# Seven additions and a division round 2**-24 each; a scale is the mean of what comes from entries that are off by that.
MEAN = 8 * 2.0**-24


def run_on_devices(check_vma, rows):
    """Three steps, state compared after each with that of a single device that has all rows."""
    advance, variables, state = mean_of_gradients(check_vma), replay.variables(), replay.first()
    for i in range(3):
        x, grad = rows(i)
        state = replay.step(state, replay.kernel_of(variables), [(x, grad)])
        variables = advance(variables, x, grad)
        stored = replay.state_of(variables)
        for name in OPERANDS:
            wanted = getattr(state, name)
            np.testing.assert_allclose(stored[f"{name}_amax_history"], wanted.amax_history, rtol=MEAN)
            np.testing.assert_allclose(stored[f"{name}_scale"], [wanted.scale], rtol=2.1 * MEAN)


@UNTOLD
def test_mean_of_gradients_where_devices_agree():
    """Equal amaxes everywhere: `pmean` of the whole tree leaves state what it is but for rounding."""

    def rows(step):
        x, grad = rows_of_all(step)
        x[:: replay.M, 0], grad[:: replay.M, 0] = 1000 + step, -10 - step
        return x, grad

    run_on_devices(False, rows)


@UNTOLD
@pytest.mark.parametrize("check_vma", [True, False])
def test_mean_of_gradients(check_vma):
    """Each device has its own amax, but its state is that of all before anyone takes a mean."""
    run_on_devices(check_vma, rows_of_all)


# ------------------------------------------------------------------------------------------- parameters alone


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = functools.partial(nn.Dense, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral)
        return layer(5)(nn.relu(layer(7)(x)))


def linen_parameters():
    model, x = TwoLayers(), normal(0, (6, 8))
    variables = model.init(jax.random.key(0), x)
    return lambda params, state: jnp.sum(model.apply({"params": params, OWG: state}, x) ** 2), variables


def plain_parameters():
    recipe, x = jaxfp8.DelayedScaling(amax_history_len=4), normal(0, (6, 8))

    def loss(params, state):
        return jnp.sum(jaxfp8.dot_general(x, params, (((1,), (0,)), ((), ())), recipe=recipe, state=state) ** 2)

    return loss, {"params": normal(1, (8, 5)), OWG: jaxfp8.init_state(recipe)}


@pytest.mark.parametrize("make", [linen_parameters, plain_parameters], ids=["linen", "plain"])
def test_gradient_of_parameters_alone(make):
    """Bitwise the gradient that comes with the state's; one warning for all layers, traces and calls of a process."""
    loss, variables = make()
    params, state = variables["params"], variables[OWG]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, state)
        loss(params, state)  # inference is no mistake
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # what Python does: once for each place
        for _ in range(2):
            got = jax.jit(jax.grad(lambda params: loss(params, state)))(params)
            jax.grad(loss)(params, state)
    assert [warning.category for warning in caught] == [jaxfp8.FP8StateWarning]
    assert OWG in str(caught[0].message)
    assert_same_bits(got, expected[0], "gradient of the parameters")
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected[1])), "with the state it is updated"
