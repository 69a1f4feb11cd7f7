"""GPUs and libraries that cannot run the custom calls: programs run without them, after one warning."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8 import ops
from jaxfp8._jax import _compat
from jaxfp8.ops import _ffi, _support

from .test_structure import OPS, cuda_text, custom_calls, dense_arguments, dense_step

NEEDS_CUBLASLT = ("scaled_matmul",)


def gpu(capability, kind="A fake GPU"):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


@pytest.fixture
def machine(monkeypatch, cuda_custom_calls):
    """Sets what the machine has: its GPUs, what is wrong with cuBLASLt, and the devices a program is lowered for."""
    monkeypatch.setattr(_support, "_warned", set())

    def has(*gpus, cublaslt="", lowered_for=()):
        def check():
            if cublaslt:
                raise RuntimeError(cublaslt)

        monkeypatch.setattr(_support, "local_gpus", lambda: list(gpus))
        monkeypatch.setattr(_compat, "gpus_of", lambda ctx: list(lowered_for))
        monkeypatch.setattr(_ffi, "check_cublaslt", check)
        jax.clear_caches()

    return has


def lowered(op):
    function, arguments = OPS[op]
    return custom_calls(cuda_text(function, *arguments))


OLD = gpu("8.0", "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("op", OPS)
def test_old_gpu(op, machine):
    """Every op is the jnp reference: old GPUs have no FP8 conversions either."""
    machine(OLD)
    function, arguments = OPS[op]
    with ops.implementation("reference"):
        reference = cuda_text(function, *arguments)
    jax.clear_caches()
    with pytest.warns(RuntimeWarning) as warned:
        assert cuda_text(function, *arguments) == reference
    assert [str(w.message) for w in warned] == [
        "jaxfp8: NVIDIA A100-SXM4-80GB has compute capability 8.0, FP8 needs 8.9 or newer; running without FP8 custom "
        "calls: same results within their bounds, slower"
    ]


def test_one_warning(machine):
    machine(OLD)
    with pytest.warns(RuntimeWarning) as warned:
        text = cuda_text(dense_step, *dense_arguments())
        lowered("quantize")
        jax.clear_caches()
        lowered("scaled_matmul")
    assert len(warned) == 1 and custom_calls(text) == {}


@pytest.mark.parametrize("op", OPS)
def test_ffi_raises(op, machine):
    machine(OLD)
    with (
        ops.implementation("ffi"),
        pytest.raises(RuntimeError, match=rf"ops.{op.split()[0]}: .* 8.0, FP8 needs 8.9 or newer"),
    ):
        lowered(op)


def test_capabilities_are_those_of_nvidia():
    assert [_support.capability(gpu(name)) for name in ("9.0", "12.1", "gfx90a", "gfx942", "")] == [
        (9, 0),
        (12, 1),
        (),
        (),
        (),
    ]


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "10.3", ""])
def test_capable_gpus(capability, machine):
    machine(gpu(capability))
    with warnings.catch_warnings(action="error"):
        assert all(lowered(op) == {op.split()[0]: 1} for op in OPS)


@pytest.mark.parametrize(
    "capability, built, runs",
    [
        ("9.0", "sm_90a", True),
        ("9.0", "sm_89", False),
        ("8.9", "sm_89 sm_90a sm_100", True),
        ("10.3", "sm_90a sm_100", True),
        ("10.0", "sm_103", False),
        ("10.3", "sm_100a", False),
        ("12.0", "sm_89 sm_90a sm_100", False),
        ("12.1", "sm_100 sm_120", True),
        ("12.0", "sm_89 sm_90a sm_100 sm_120", True),
    ],
)
def test_gpus_that_the_library_has_no_code_for(capability, built, runs, machine, monkeypatch):
    """Machine code runs from its version on within its generation; `a` means that version alone."""
    machine(gpu(capability))
    monkeypatch.setattr(_ffi, "cuda_architectures", built.split)
    if runs:
        assert lowered("quantize") == {"quantize": 1}
    else:
        with pytest.warns(RuntimeWarning, match=rf"{capability}, the CUDA library has code for .*; add yours to"):
            assert lowered("quantize") == {}


def test_ahead_of_time(machine):
    """Without GPUs in the machine, those that the program is for count; without any, they are assumed to be capable."""
    machine(cublaslt="not found")
    assert lowered("scaled_matmul") == {"scaled_matmul": 1}
    machine(OLD, lowered_for=[gpu("9.0")])
    assert lowered("quantize") == {"quantize": 1}
    machine(lowered_for=[gpu("9.0"), OLD])
    with pytest.warns(RuntimeWarning, match="8.0"):
        assert lowered("quantize") == {}


def test_missing_cublaslt(machine):
    """The product becomes the pattern that XLA makes FP8 products of; the other ops stay."""
    machine(gpu("9.0"), cublaslt="cuBLASLt of CUDA 13 not found: libcublasLt.so.13: cannot open")
    function, arguments = OPS["scaled_matmul"]
    with pytest.warns(RuntimeWarning, match="jaxfp8: cuBLASLt of CUDA 13 not found") as warned:
        text = cuda_text(function, *arguments)
    assert len(warned) == 1 and custom_calls(text) == {}
    with ops.implementation("xla"):
        jax.clear_caches()
        assert text == cuda_text(function, *arguments)
    with warnings.catch_warnings(action="error"):
        assert all(lowered(op) == {op.split()[0]: 1} for op in OPS if op not in NEEDS_CUBLASLT)
    with ops.implementation("ffi"), pytest.raises(RuntimeError, match="ops.scaled_matmul: .*cuBLASLt of CUDA 13 not"):
        lowered("scaled_matmul")


def test_other_implementations_do_not_ask(machine):
    machine(OLD)
    with warnings.catch_warnings(action="error"):
        for name in ("reference", "xla"):
            with ops.implementation(name):
                jax.clear_caches()
                assert lowered("scaled_matmul") == {}


def test_other_platforms_do_not_ask(machine, monkeypatch):
    """A CPU program in a machine with an old GPU keeps its custom calls, and runs."""
    machine(OLD, cublaslt="too old")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with warnings.catch_warnings(action="error"):
        data, _ = jax.jit(lambda x: ops.quantize(x, np.float32(2), jnp.float8_e4m3fn))(x)
    oracle.assert_bitwise(data, oracle.quantize(x, np.float32(2), oracle.E4M3)[0], "data")


def test_library_answers():
    """The built library says what it finds; on a machine without CUDA, why it does not."""
    if not jaxfp8.has_cuda_kernels():
        pytest.skip("the CUDA library was not built")
    try:
        _ffi.check_cublaslt()
    except RuntimeError as error:
        assert "libcublasLt.so.13" in str(error)
