"""Each test of this folder traces its own programs."""

import jax
import pytest


@pytest.fixture(autouse=True)
def nothing_stays_traced():
    """Mutants neither meet a program traced before them nor live on in one."""
    yield
    jax.clear_caches()
