"""Optax and Flax promote dtypes implicitly; our own modules here are tested under the strict rules of the session."""

import jax
import pytest


@pytest.fixture
def promotion_as_optax_wants():
    with jax.numpy_dtype_promotion("standard"):
        yield
