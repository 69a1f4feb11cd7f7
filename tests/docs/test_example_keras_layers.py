"""examples/keras_layers.py: `fit` trains parameters and stores the state."""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

import jaxfp8

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", exc_type=ImportError)
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend", allow_module_level=True)

NAME = "keras_layers"
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)


def fitted(example, epochs, **arguments):
    """(model, x, losses) after `epochs` epochs of four batches of different sizes."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            example.Fp8Dense(32, RECIPE, activation="relu"),
            example.Fp8Dense(8, RECIPE),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01, **arguments), "mse")
    x = normal(32, 16)
    x *= np.repeat([1, 4, 3, 2], 8)[:, None]
    losses = [
        model.fit(x, x[:, :8], batch_size=8, shuffle=False, verbose=0).history["loss"]
        for _ in range(epochs)
    ]
    return model, x, losses


def test_fit_stores_the_state(example):
    model, x, losses = fitted(example, epochs=3)
    assert losses[-1] < losses[0]
    amaxes = np.abs(x).reshape(4, 8, 16).max((1, 2))
    history = model.layers[0].state["input_amax_history"].numpy()
    np.testing.assert_array_equal(history, amaxes[[3, 0, 1, 2]])
    assert history[0] != history[1]


def test_accumulation_stores_the_largest_amax(example):
    model, x, _ = fitted(example, epochs=1, gradient_accumulation_steps=4)
    history = model.layers[0].state["input_amax_history"].numpy()
    np.testing.assert_array_equal(history, [np.abs(x).max(), 0, 0, 0])


def test_values_are_those_of_dense(example):
    model, x, _ = fitted(example, epochs=1)
    layer = model.layers[0]
    plain = keras.layers.Dense(32, activation="relu")
    plain.build((None, 16))
    plain.set_weights([layer.kernel.numpy(), layer.bias.numpy()])
    error = jnp.linalg.norm(layer(x) - plain(x)) / jnp.linalg.norm(plain(x))
    assert 0 < error < 2**-4  # two operands, each rounded by at most 2**-4
