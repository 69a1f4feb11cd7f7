"""What the CUDA tests share: the emulated kernels and handlers, built once."""

import pytest

from . import emulated
from .ptx import machine


@pytest.fixture(scope="session")
def emulated_library():
    """The kernels of cuda/, compiled for the host."""
    if emulated.compiler() is None:
        pytest.skip("needs a C++ compiler with _Float16 to emulate the CUDA kernels")
    return emulated.Emulated(emulated.build())


# CI has time for one architecture; the PTX of each is other code.
OTHER_ARCHITECTURES = [
    pytest.param(f"ptx-{name}", marks=pytest.mark.slow) for name in ("89", "100", "120")
]


@pytest.fixture(scope="session", params=["emulated", "ptx-90a", *OTHER_ARCHITECTURES])
def launchers(request):
    """The launchers over the emulated kernels, and over the PTX that nvcc makes of them
    for an architecture.
    """
    if request.param == "emulated":
        return request.getfixturevalue("emulated_library")
    return machine.launchers(request.param.removeprefix("ptx-"))


@pytest.fixture(
    params=[(132, False, -1), (1, True, 1), (2, False, 0)],
    ids=["132", "1-backwards", "2"],
)
def kernels(launchers, request):
    """The kernels on devices of several sizes, so that grids loop; threads in either
    order; approximations at either end of their error."""
    launchers.configure(*request.param)
    yield launchers
    launchers.configure()


@pytest.fixture(scope="session")
def handlers():
    """The handlers of cuda/ as custom calls `emulated_cuda_<op>` of the CPU."""
    return emulated.register_handlers()


@pytest.fixture
def over_handlers():
    """Ops on a CPU as on a GPU, over the emulated handlers."""
    with emulated.ops():
        yield
