"""`nnx.bridge` in both directions: the collection `_overwrite_with_gradient` is OverwriteWithGradient variables."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx
from flax.training.train_state import TrainState
from programs.known_amax import leaves

import jaxfp8
import jaxfp8.nnx
from jaxfp8.nnx import Fp8DotGeneral, OverwriteWithGradient

from .cases import RECIPE, H, K, M, N, assert_plain, expected_state, operands, use


@pytest.fixture(autouse=True)
def promotion():
    """Optax mixes step counts and floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def linen_dense():
    return nn.Dense(N, use_bias=False, dot_general_cls=lambda **kw: jaxfp8.Fp8DotGeneral(recipe=RECIPE, **kw))


def to_nnx(module):
    return nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(jnp.ones((M, K)))


def test_the_type_is_registered():
    assert nnx.variable_type_from_name("_overwrite_with_gradient") is OverwriteWithGradient
    assert nnx.variable_name_from_type(OverwriteWithGradient) == jaxfp8.OVERWRITE_WITH_GRADIENT


@pytest.mark.parametrize("uses", [1, 3])
def test_linen_model_in_nnx(uses):
    """Five steps of a bridged Linen layer, used once or three times in a step, trained as any NNX model."""
    layer, state = to_nnx(linen_dense()), oracle.LayerState.init(H)
    optimizer = jaxfp8.nnx.Optimizer(layer, optax.adamw(1e-2))

    @nnx.jit
    def step(layer, optimizer, xs, grads):
        loss = lambda layer: sum(use(layer, x, grad) for x, grad in zip(xs, grads, strict=True))  # noqa: E731
        optimizer.update(layer, jaxfp8.nnx.grad(loss)(layer))

    for i in range(5):
        xs, grads = operands(i, uses)
        kernel = np.asarray(layer.kernel.get_value())
        step(layer, optimizer, xs, grads)
        state = expected_state([(x, kernel, grad) for x, grad in zip(xs, grads, strict=True)], state)
        variables = nnx.to_pure_dict(nnx.state(layer, OverwriteWithGradient))
        assert_same_bits(variables["Fp8DotGeneral_0"], leaves(state), f"step {i}")
    assert_plain(layer)


@pytest.mark.parametrize("uses", [1, 3])
def test_nnx_model_in_linen(uses):
    """Five steps of a bridged NNX layer with Flax's own TrainState."""
    # A function, because ToLinen makes its module anew in every call: an instance among its kwargs would be shared.
    layer = nnx.bridge.ToLinen(
        lambda rngs: nnx.Linear(K, N, use_bias=False, dot_general=Fp8DotGeneral(RECIPE), rngs=rngs)
    )
    variables = layer.init(jax.random.key(0), jnp.ones((M, K)))
    assert set(variables) == {"params", jaxfp8.OVERWRITE_WITH_GRADIENT}
    train = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.adamw(1e-2))

    @jax.jit
    def step(train, xs, grads):
        def loss(variables):
            products = [jnp.vdot(train.apply_fn(variables, x), g) for x, g in zip(xs, grads, strict=True)]
            return sum(products)

        return train.apply_gradients(grads=jaxfp8.grad(loss)(train.params))

    state = oracle.LayerState.init(H)
    for i in range(5):
        xs, grads = operands(i, uses)
        kernel = np.asarray(train.params["params"]["kernel"])
        train = step(train, xs, grads)
        state = expected_state([(x, kernel, grad) for x, grad in zip(xs, grads, strict=True)], state)
        assert_same_bits(train.params[jaxfp8.OVERWRITE_WITH_GRADIENT]["dot_general"], leaves(state), f"step {i}")
        assert not np.array_equal(kernel, train.params["params"]["kernel"])
