"""The recipe changes in a run: parameters, the optimizer's state and the FP8 state of
quantizers that stay go on, and the next step is that of a model that is built anew.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from draws import KEY, normal
from equality import assert_same_bits
from flax import nnx, traverse_util

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import OverwriteWithGradient

pytestmark = pytest.mark.usefixtures("as_users_have_jax")

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
DELAYED = jaxfp8.DelayedScaling(amax_history_len=4)
RECIPES = {
    "fprop in bfloat16": jaxfp8.ByProduct(fprop=None, dgrad=DELAYED, wgrad=DELAYED),
    "e4m3": jaxfp8.DelayedScaling(amax_history_len=4, fp8_format=jaxfp8.Format.E4M3),
    "current": jaxfp8.Float8CurrentScaling(),
}
X = normal(8, 16, 32)
TX = optax.adamw(1e-2)


def linen_model(recipe):
    cls = recipe and jaxfp8.make_dot_general_cls(recipe)
    up, down = (nn.Dense(n, dtype=jnp.bfloat16, dot_general_cls=cls) for n in (48, 32))
    return nn.Sequential([up, nn.relu, down])


def changed_linen(train, recipe):
    """The five lines of docs/recipes.md."""
    model = linen_model(recipe)
    fresh = model.init(jax.random.key(1), X[0]).get(OWG, {})
    state = traverse_util.flatten_dict(fresh)
    state |= traverse_util.flatten_dict(train.params[OWG])
    variables = train.params | {OWG: traverse_util.unflatten_dict(state)}
    created = train.create(apply_fn=model.apply, params=variables, tx=train.tx)
    return created.replace(step=train.step, opt_state=train.opt_state)


@jax.jit
def linen_step(train, x):
    grads = jax.grad(lambda v: jnp.mean(train.apply_fn(v, x) ** 2))(train.params)
    return train.apply_gradients(grads=grads)


def linen_train():
    model = linen_model(DELAYED)
    train = jaxfp8.linen.TrainState.create(
        apply_fn=model.apply, params=model.init(KEY, X[0]), tx=TX
    )
    for x in X[:3]:
        train = linen_step(train, x)
    return train


def built_anew(train, recipe, state):
    """A TrainState of a new model, with the same arrays; `state` is the FP8 state that
    it has.
    """
    variables = {"params": train.params["params"]}
    if state:
        variables[OWG] = traverse_util.unflatten_dict(state)
    anew = jaxfp8.linen.TrainState.create(
        apply_fn=linen_model(recipe).apply, params=variables, tx=optax.adamw(1e-2)
    )
    return anew.replace(step=train.step, opt_state=train.opt_state)


def but_state(train):
    """All of a TrainState that changes, without the FP8 state."""
    return train.step, train.opt_state, train.params["params"]


@pytest.mark.parametrize("name", RECIPES)
def test_linen(name):
    recipe = RECIPES[name]
    train = linen_train()
    changed = changed_linen(train, recipe)
    # 1. What the new model has by itself: state of quantizers that stay, or empty.
    fresh = linen_model(recipe).init(jax.random.key(1), X[0]).get(OWG, {})
    fresh = traverse_util.flatten_dict(fresh)
    old = traverse_util.flatten_dict(train.params[OWG])
    expected = {path: old.get(path, leaf) for path, leaf in fresh.items()}
    assert (len(expected.keys() & old.keys()), len(expected)) == {
        "fprop in bfloat16": (4, 12),
        "e4m3": (12, 12),
        "current": (0, 0),
    }[name]
    # 2. The next step is that of a model that is built anew with these arrays.
    after = linen_step(changed, X[3])
    anew = linen_step(built_anew(train, recipe, expected), X[3])
    assert_same_bits(but_state(after), but_state(anew))
    got = traverse_util.flatten_dict(after.params[OWG])
    new = traverse_util.flatten_dict(anew.params.get(OWG, {}))
    # State of quantizers that do not run stays, for the way back.
    assert_same_bits(got, old | new, "state")


def test_a_region_in_bfloat16():
    """One line, in Linen: a bfloat16 model's steps, and FP8 state that waits."""
    train = linen_train()
    after = train
    plain = built_anew(train, None, {})
    for x in X[3:5]:
        with jaxfp8.autocast(enabled=False):
            after = linen_step(after, x)
        plain = linen_step(plain, x)
    assert_same_bits(but_state(after), but_state(plain))
    assert_same_bits(after.params[OWG], train.params[OWG], "state")


def state_of(model):
    state = nnx.to_pure_dict(nnx.state(model, OverwriteWithGradient))
    return traverse_util.flatten_dict(state)


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("name", RECIPES)
def test_nnx(name):
    """The three lines of docs/recipes.md: a model has the state of its recipe, of
    quantizers that stay the one that it had, and that of others for the way back.
    """
    model = nnx.Linear(32, 48, rngs=nnx.Rngs(0))
    jaxfp8.quantize(model, [(".*", DELAYED)])
    state = nnx.state(model, OverwriteWithGradient)
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 2, state))
    params = params_of(model)
    for recipe in (RECIPES[name], DELAYED):
        old = state_of(model)
        state = nnx.state(model, OverwriteWithGradient)
        jaxfp8.quantize(model, [(".*", recipe)])
        fresh = state_of(model)
        nnx.update(model, state)
        assert_same_bits(state_of(model), fresh | old, type(recipe).__name__)
        assert_same_bits(params_of(model), params)
