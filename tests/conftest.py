"""Test session set-up: eight CPU devices and strict promotion, before JAX is
imported.
"""

import os
import pathlib
import sys
import time

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()
START = time.monotonic()
# `import oracle` works from every folder of tests and under every pytest import mode.
TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(TESTS))

import compile_cache  # noqa: E402
import jax  # noqa: E402  (the flag above must come first)
import promotion  # noqa: E402
import pytest  # noqa: E402
import tiers  # noqa: E402

compile_cache.enable()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def gpu_devices() -> list:
    """The GPUs that JAX sees; empty where there is none."""
    try:
        return jax.devices("gpu")
    except RuntimeError:
        return []


@pytest.fixture(autouse=True)
def code_for_every_gpu(monkeypatch):
    """Lower for GPUs that the CUDA module of this build has no code for: `make test`
    builds it for Hopper alone.
    """
    from jaxfp8.ops import _ffi

    if not gpu_devices():
        # an empty list: not known, so nothing is missing
        monkeypatch.setattr(_ffi, "cuda_architectures", list)


@pytest.fixture
def cuda_custom_calls(monkeypatch):
    """Lower as where the CUDA module is installed; forget what was traced before and
    after.
    """
    from jaxfp8.ops import _ffi

    if not _ffi.has_cuda_kernels():
        monkeypatch.setitem(_ffi._modules, "cuda", None)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture
def as_users_have_jax():
    """JAX's own rules of promotion, in place of the strict ones of the session."""
    with promotion.as_users_have_jax():
        yield


@pytest.fixture
def promotion_as_optax_wants():
    """Optax and Flax promote dtypes implicitly."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def reads(monkeypatch):
    """The products whose state is read before a loop."""
    from jaxfp8.recipes import _reading

    found = []
    read = _reading.read
    monkeypatch.setattr(
        _reading, "read", lambda products: found.extend(products) or read(products)
    )
    return found


@pytest.fixture
def nothing_stays_traced():
    """A mutant is not to be hidden by a program traced before it, nor to live on in one
    traced during it.
    """
    jax.clear_caches()
    yield
    jax.clear_caches()


def pytest_addoption(parser):
    def seeds(text):
        first, count = text.split(":")
        return int(first), int(count)

    parser.addoption(
        "--ci-seconds",
        metavar="SECONDS",
        type=int,
        help="skip what `make test` does not run after so many seconds",
    )
    parser.addoption(
        "--fuzz",
        metavar="FIRST:COUNT",
        type=seeds,
        default="0:40",
        help="seeds of bad_days/fuzz",
    )


def pytest_ignore_collect(collection_path, config):
    """Do not import what `make test` leaves to CI: each of its processes would take
    seconds for it.
    """
    path = (
        collection_path.relative_to(TESTS)
        if collection_path.is_relative_to(TESTS)
        else None
    )
    is_left_out = (
        "not ci" in config.option.markexpr
        and path
        and path.parts
        and tiers.is_in_ci(path)
    )
    return True if is_left_out else None


def pytest_configure(config):
    """Workers take files in the order of tests: xdist would put those with the most
    tests first, not the longest.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    tiers.mark(items, TESTS)
    tiers.order(items, TESTS)


def pytest_runtest_setup(item):
    seconds = item.config.option.ci_seconds
    if (
        seconds is not None
        and item.get_closest_marker("ci")
        and time.monotonic() - START > seconds
    ):
        pytest.skip(f"{seconds} seconds of CI are over: `make test-all` runs this")
    if item.get_closest_marker("gpu") and not gpu_devices():
        pytest.skip(f"needs an NVIDIA GPU; JAX sees only {jax.default_backend()}")
