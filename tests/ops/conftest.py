"""The implementations of every op as one fixture: one body, several backends."""

import jax
import pytest

from jaxfp8 import ops


@pytest.fixture(params=["ffi", "reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def implementation(request):
    """Runs the test under one implementation of the ops; "cuda" is the custom calls on the first GPU."""
    name = request.param
    device = jax.devices("gpu" if name == "cuda" else "cpu")[0]
    with jax.default_device(device), ops.implementation("ffi" if name == "cuda" else name):
        yield name
