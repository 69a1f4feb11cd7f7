"""The implementations of every op as one fixture: one body, several backends."""

import contextlib

import jax
import pytest
from cuda.ptx import machine

from cuda import emulated
from jaxfp8 import ops

from . import cases

EACH_FORMAT = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
EACH_DTYPE = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
EACH_OUT_DTYPE = pytest.mark.parametrize(
    "out_dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS
)
EMULATED = pytest.param("emulated", marks=pytest.mark.ci)
# CI has time for one architecture; the PTX of each is other code.
INTERPRETED = (
    pytest.param("ptx_90a", marks=pytest.mark.ci),
    *(pytest.param(f"ptx_{name}", marks=pytest.mark.slow) for name in (89, 100, 120)),
)
ALL = (
    "ffi",
    "reference",
    EMULATED,
    *INTERPRETED,
    pytest.param("cuda", marks=pytest.mark.gpu),
)


def pytest_generate_tests(metafunc):
    """Run a test for all implementations or those that its module names: "cpu" and
    "gpu" are the defaults there.
    """
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize(
            "implementation",
            getattr(metafunc.module, "IMPLEMENTATIONS", ALL),
            indirect=True,
        )


@pytest.fixture
def implementation(request):
    """Runs the test under one implementation of the ops.

    "cuda" is the custom calls on the first GPU, "emulated" their source on the CPU,
    "ptx_90a" what nvcc makes of it.
    """
    name = request.param
    device = jax.devices("gpu" if name in ("cuda", "gpu") else "cpu")[0]
    selected = {"cuda": "ffi", "cpu": None, "gpu": None}.get(name, name)
    with jax.default_device(device), contextlib.ExitStack() as stack:
        if name == "emulated":
            stack.enter_context(emulated.ops())
        elif name.startswith("ptx_"):
            stack.enter_context(machine.ops(name.removeprefix("ptx_")))
        elif selected:
            stack.enter_context(ops.implementation(selected))
        yield name
