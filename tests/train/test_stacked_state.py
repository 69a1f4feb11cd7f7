"""stack_state: every step has the bits of the same step without it, and checkpoints
hold the same leaves.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import KEY
from equality import assert_same_bits
from flax import serialization
from flax.training import train_state
from parametrize import each_row
from recipes import grids

import jaxfp8
from jaxfp8.train import stack_state, unstack_state

from . import replay

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

WIDTH, LAYERS = 16, 2
STACKED = {"params": 0, replay.OWG: 0}
DELAYED = jaxfp8.DelayedScaling(amax_history_len=4)
CURRENT_FIRST = jaxfp8.DelayedScaling(
    amax_history_len=4, first_step="current", amax_compute_algo=jnp.mean
)
TX = optax.adam(1e-2)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.relu(nn.Dense(WIDTH)(x)), None


class Model(nn.Module):
    """Products alike, layers in a scan, and one product with another history."""

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x, _ = Block()(x)
        scan = nn.scan(
            Block, variable_axes=STACKED, split_rngs={"params": True}, length=LAYERS
        )
        return nn.Dense(4, name="head")(scan(name="scan")(x, None)[0])


def inputs(step):
    return np.random.default_rng(step).standard_normal((8, WIDTH)) * 2.0**step


# Compiled as users compile it. Compiled quickly, as in CI, one program may round a
# product before its sum where the other does not.
OPTIONS = {"xla_backend_optimization_level": 3}
if jax.__version_info__ < (0, 12):  # newer versions have no such option
    OPTIONS["xla_cpu_use_fusion_emitters"] = True


@functools.partial(jax.jit, compiler_options=OPTIONS)
def advance(train, x):
    """Take a step whose loss calls the model twice."""

    def loss(variables):
        first, second = (train.apply_fn(variables, rows) for rows in jnp.split(x, 2))
        return jnp.sum(first**2) + 9 * jnp.sum(second**2)

    value, grads = jax.value_and_grad(loss)(train.params)
    return train.apply_gradients(grads=grads), value


CASES = {
    "TrainState": (jaxfp8.linen.TrainState, DELAYED, TX),
    "MultiSteps, more quantizers": (
        jaxfp8.linen.TrainState,
        jaxfp8.ByProduct(CURRENT_FIRST, DELAYED, DELAYED),
        optax.MultiSteps(TX, 2),
    ),
    "Flax's, a user's quantizer": (
        train_state.TrainState,
        jaxfp8.CustomRecipe(lambda role: grids.Counting(4)),
        TX,
    ),
}


@each_row("cls, recipe, tx", CASES)
def test_a_run_has_the_bits_of_the_same_run_without_it(cls, recipe, tx):
    rules = [("head", jaxfp8.DelayedScaling(amax_history_len=2)), (".*", recipe)]
    model = jaxfp8.quantize(Model(), rules)
    variables = jax.jit(model.init)(KEY, inputs(0))
    plain = cls.create(apply_fn=model.apply, params=variables, tx=tx)
    if cls is train_state.TrainState:  # its create shows tx all variables
        stacked = stack_state(plain)
    else:
        params = stack_state(variables)
        stacked = cls.create(apply_fn=model.apply, params=params, tx=tx)
    for step in range(4):
        plain, expected = advance(plain, inputs(step))
        stacked, loss = advance(stacked, inputs(step))
        assert_same_bits(loss, expected, f"loss {step}")
        assert_same_bits(unstack_state(stacked.params), plain.params, f"step {step}")
    assert len(stacked.params[replay.OWG].arrays) == 3  # blocks, scan, head
    if recipe is DELAYED:
        tables = [str(jaxfp8.inspect.summary(train)) for train in (stacked, plain)]
        assert tables[0] == tables[1]


def test_checkpoints_hold_the_state_of_each_product():
    rng = np.random.default_rng(0)
    shapes = {"input_amax_history": 4, "input_scale": 1}
    state = {
        product: {name: rng.random(n, np.float32) for name, n in shapes.items()}
        for product in "abc"
    }
    state["b"]["input_amax_history"] = rng.random(8, np.float32)
    variables = {replay.OWG: state, "params": {"kernel": np.ones(3, np.float32)}}
    stacked = stack_state(variables)
    assert len(jax.tree.leaves(stacked)) == 1 + 4
    assert_same_bits(unstack_state(stacked), variables)
    saved = serialization.to_bytes(stacked)
    assert saved == serialization.to_bytes(unstack_state(stacked))
    assert_same_bits(serialization.from_bytes(variables, saved), variables)
    for target in (stacked, jax.eval_shape(lambda: stacked)):
        assert_same_bits(serialization.from_bytes(target, saved), stacked)
    merged = jaxfp8.convert.merge_state(stacked, variables)
    assert_same_bits(merged, variables)
    reset = jaxfp8.convert.reset_state(stacked)
    assert_same_bits(unstack_state(reset), jaxfp8.convert.reset_state(variables))
    # state that is stacked, or that is not there, stays
    assert stack_state(stacked)[replay.OWG] is stacked[replay.OWG]
    assert_same_bits(stack_state(variables["params"]), variables["params"])
