"""Programs of jax_enable_x64 with strict promotion: the step, the tools around it, and
float64 beside FP8.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxfp8


@pytest.fixture(autouse=True)
def x64():
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (16, 32), jnp.float32)


def model(recipe):
    return nn.Dense(64, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(recipe=recipe))


@pytest.mark.parametrize(
    "recipe",
    [jaxfp8.DelayedScaling(), jaxfp8.Float8CurrentScaling()],
    ids=["delayed", "current"],
)
def test_linen(recipe, x):
    """A step by update_state and by TrainState, eagerly and under jit; accumulation,
    calibration, the tools.
    """
    layer = model(recipe)
    variables = layer.init(jax.random.key(1), x)

    def loss(variables):
        return jnp.mean(layer.apply(variables, x) ** 2)

    gradients = jaxfp8.grad(loss)(variables)
    total = jaxfp8.accumulate_gradients(None, gradients, weight=1 / 3)
    after = jaxfp8.update_state(
        variables, jaxfp8.accumulate_gradients(total, gradients, weight=2 / 3)
    )
    jitted = jax.jit(jaxfp8.update_state)(variables, gradients)
    assert jax.tree.structure(after) == jax.tree.structure(jitted)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.float32)}
    trainer = jaxfp8.linen.TrainState.create(
        apply_fn=layer.apply, params=variables, tx=optax.sgd(0.1)
    )
    jax.jit(lambda trainer: trainer.apply_gradients(grads=gradients))(
        trainer.apply_gradients(grads=gradients)
    )
    jaxfp8.train.average(variables, after, 0.99)
    assert str(jaxfp8.inspect.count(jax.grad(loss), variables)[1])
    if recipe == jaxfp8.DelayedScaling():
        jaxfp8.inspect.summary(after)
        calibrated = jaxfp8.calibrate(layer, variables, [(x,)])
        jaxfp8.freeze(layer, calibrated, x)
