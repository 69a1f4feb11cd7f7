"""Where custom calls cannot run, or are switched off: programs run without them, after
one warning.
"""

import functools
import re
import types
import warnings

import another_process
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from lowering import cuda_text

import jaxfp8
from jaxfp8 import inspect, ops
from jaxfp8._jax import _compat
from jaxfp8.inspect import _machine, _op_calls
from jaxfp8.ops import _ffi, _support

from .test_structure import (
    ON_CUDA,
    OPS,
    ROWS,
    custom_calls,
    dense_arguments,
    product,
)

ON_GPUS = [op for op in OPS if op not in _ffi._CPU_ONLY]
SLOWER = "same results within their bounds, slower"
OLD_REASON = "NVIDIA A100-SXM4-80GB has compute capability 8.0, FP8 needs 8.9 or newer"


def gpu(capability, kind="A fake GPU"):
    return types.SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability=capability
    )


OLD = gpu("8.0", "NVIDIA A100-SXM4-80GB")


@pytest.fixture
def machine(monkeypatch, cuda_custom_calls):
    """Sets GPUs, what is wrong with cuBLASLt, the devices a program is lowered for, and
    what the variable disables.
    """
    monkeypatch.setattr(_support, "_told", [[]])

    def has(*gpus, cublaslt="", lowered_for=(), disabled=""):
        def check():
            if cublaslt:
                raise RuntimeError(cublaslt)
            return 130002

        monkeypatch.setattr(_support, "local_gpus", lambda: list(gpus))
        gpus_of_program = list(lowered_for)
        monkeypatch.setattr(_compat, "gpus_of", lambda ctx: gpus_of_program)
        monkeypatch.setattr(_ffi, "cublaslt_version", check)
        monkeypatch.setattr(_support, "_disabled", _support.parsed(disabled))
        jax.clear_caches()

    return has


def lowered(op):
    function, arguments = _op_calls.call(op, _machine.EXAMPLE)
    return custom_calls(cuda_text(function, *arguments))


def assert_custom_calls(but=None) -> None:
    """Of all ops but one, and but the product of blocks, which is by mode."""
    with warnings.catch_warnings(action="error"):
        for op in set(ON_GPUS) - {but, "block_scaled_matmul"}:
            assert lowered(op) == ON_CUDA[op], op


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("is_disabled", [False, True], ids=["old GPU", "disabled"])
def test_the_reference_runs_in_its_place(op, is_disabled, machine):
    """As if it were selected, for this op alone where it is disabled; with one warning.
    "ffi" raises.
    """
    machine(*([] if is_disabled else [OLD]), disabled=op * is_disabled)
    function, arguments = _op_calls.call(op, _machine.EXAMPLE)
    with ops.implementation("reference"):
        reference = cuda_text(function, *arguments)
    jax.clear_caches()
    with pytest.warns(RuntimeWarning) as warned:
        assert cuda_text(function, *arguments) == reference
        jax.clear_caches()
        cuda_text(function, *arguments)
    reason = f"JAXFP8_DISABLE names {op}" if is_disabled else OLD_REASON
    assert [str(w.message) for w in warned] == [
        f"jaxfp8: {reason}; running in jnp: {SLOWER}"
    ]
    with (
        ops.implementation("ffi"),
        pytest.raises(RuntimeError, match=rf"ops\.{op}: .*{reason}$"),
    ):
        lowered(op)


@pytest.mark.parametrize("op", ON_GPUS)
def test_others_keep_their_custom_calls(op, machine):
    # the name of an op of histories disables that of their rows too
    machine(disabled=",".join(set(OPS) - {op, *ROWS.get(op, ())}))
    with warnings.catch_warnings(action="error"):
        assert lowered(op) == ON_CUDA[op]


def dense_step(x, kernel, grad, state):
    y, vjp = jax.vjp(product, x, kernel, state)
    return y, vjp(grad)


def test_one_warning(machine):
    machine(OLD)
    with pytest.warns(RuntimeWarning) as warned:
        text = cuda_text(dense_step, *dense_arguments())
        lowered("quantize")
        jax.clear_caches()
        lowered("scaled_matmul")
    assert len(warned) == 1 and custom_calls(text) == {}


@pytest.mark.parametrize("capability", ["8.9", "9.0", "10.0", "10.3", ""])
def test_capable_gpus(capability, machine):
    machine(gpu(capability))
    assert_custom_calls()


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
    ],
)
def test_gpus_that_the_library_has_no_code_for(
    capability, built, runs, machine, monkeypatch
):
    """Machine code runs from its version on within its generation; `a` means that
    version alone.
    """
    machine(gpu(capability))
    monkeypatch.setattr(_ffi, "cuda_architectures", built.split)
    if runs:
        assert lowered("quantize") == {"quantize": 1}
    else:
        with pytest.warns(
            RuntimeWarning,
            match=rf"{capability}, the CUDA library has code for .*; add yours to",
        ):
            assert lowered("quantize") == {}


def test_ahead_of_time(machine):
    """Without GPUs in the machine, those that the program is for count; without any,
    they are assumed to be capable.
    """
    machine(cublaslt="not found")
    assert lowered("scaled_matmul") == {"scaled_matmul": 1}
    machine(OLD, lowered_for=[gpu("9.0")])
    assert lowered("quantize") == {"quantize": 1}
    machine(lowered_for=[gpu("9.0"), OLD])
    with pytest.warns(RuntimeWarning, match="8.0"):
        assert lowered("quantize") == {}


def test_missing_cublaslt(machine):
    """The product becomes the pattern that XLA makes FP8 products of; the other ops
    stay.
    """
    machine(
        gpu("9.0"),
        cublaslt="cuBLASLt of CUDA 13 not found: libcublasLt.so.13: cannot open",
    )
    function, arguments = _op_calls.call("scaled_matmul", _machine.EXAMPLE)
    with pytest.warns(
        RuntimeWarning, match="jaxfp8: cuBLASLt of CUDA 13 not found"
    ) as warned:
        text = cuda_text(function, *arguments)
    assert len(warned) == 1 and custom_calls(text) == {}
    with ops.implementation("xla"):
        jax.clear_caches()
        assert text == cuda_text(function, *arguments)
    assert_custom_calls(but="scaled_matmul")
    with (
        ops.implementation("ffi"),
        pytest.raises(
            RuntimeError, match="ops.scaled_matmul: .*cuBLASLt of CUDA 13 not"
        ),
    ):
        lowered("scaled_matmul")


def test_others_do_not_ask(machine):
    """Other implementations; a CPU program in a machine with an old GPU, which keeps
    its custom calls and runs.
    """
    machine(OLD, cublaslt="too old")
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    with warnings.catch_warnings(action="error"):
        for name in ("reference", "xla"):
            with ops.implementation(name):
                assert lowered("scaled_matmul") == {}
        data, _ = jax.jit(lambda x: ops.quantize(x, np.float32(2), jnp.float8_e4m3fn))(
            x
        )
    oracle.assert_bitwise(
        data, oracle.quantize(x, np.float32(2), oracle.E4M3)[0], "data"
    )


# ----------------------------------------------------------------------- JAXFP8_DISABLE


def test_what_says_that_an_op_is_disabled(machine):
    """`python -m jaxfp8` and `assert_fp8`."""
    current = functools.partial(product, recipe=jaxfp8.Float8CurrentScaling())
    operands = [np.ones((32, 32), oracle.BF16)] * 2
    machine()
    inspect.assert_fp8(current, *operands, platform="cuda")
    machine(disabled="quantize_norm,scaled_matmul")
    rows = _machine.active_ops("cuda")
    assert {row["name"] for row in rows if row["why"] == "no kernel for cuda"} == set(
        OPS
    ) - set(ON_GPUS)
    why = {
        row["name"]: row["why"] for row in rows if row["why"] and row["name"] in ON_GPUS
    }
    assert why == {
        name: f"JAXFP8_DISABLE names {name}"
        for name in ("quantize_norm", "scaled_matmul")
    }
    with pytest.raises(AssertionError, match="JAXFP8_DISABLE names scaled_matmul"):
        inspect.assert_fp8(current, *operands, platform="cuda")


@pytest.mark.parametrize(
    "value, printed",
    [
        ("", "None"),
        (" amax , quantize_norm,", "JAXFP8_DISABLE names amax"),
        (
            "amax,Quantize",
            "names of ops, .* got Quantize; the ops are adam_update",
        ),
    ],
)
def test_the_environment_is_read(value, printed):
    """By a process of its own, when it imports jaxfp8; an unknown name is refused."""
    program = "from jaxfp8.ops import _support; print(_support.why_disabled('amax'))"
    environment = {
        "JAXFP8_DISABLE": value,
        "PYTHONPATH": another_process.PATH,
        "JAX_PLATFORMS": "cpu",
    }
    is_refused = "got" in printed
    done = another_process.python("-c", program, code=int(is_refused), **environment)
    assert re.search(printed, done.stderr if is_refused else done.stdout)
