"""`python -m jaxfp8`: what it says of ops and libraries, also where something is
missing or broken.
"""

import os
import re
import sys

import another_process
import jax
import pytest
from lowering import cuda_text
from ops import cases
from ops.test_support import gpu, machine as machine

import jaxfp8
from jaxfp8 import __main__ as command
from jaxfp8.inspect import _machine, _op_calls
from jaxfp8.ops import _ffi, _support

ON_CPU = set(cases.TARGETS)
OPS = _op_calls.OPS
NATIVE = pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="no CPU library")


def by_name(rows) -> dict:
    return {row["name"]: row for row in rows}


@pytest.fixture
def few_programs(monkeypatch):
    """One op, where the others would say the same."""
    monkeypatch.setattr(_op_calls, "OPS", {"amax": OPS["amax"]})


@pytest.fixture
def no_libraries(monkeypatch, tmp_path):
    """An installation without compiled modules, in a folder with what its build
    says.
    """
    for name in ("_cpu", "_cuda"):
        monkeypatch.delitem(sys.modules, f"jaxfp8.{name}", raising=False)
    monkeypatch.setattr(jaxfp8, "__path__", [str(tmp_path)])
    # The finder of an editable install knows the modules without a path.
    others = [
        finder for finder in sys.meta_path if "_editable" not in finder.__module__
    ]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setattr(_ffi, "_SOURCES", tmp_path / "CMakeLists.txt")
    (tmp_path / "_modules.txt").write_text(
        "cpu: not built: no Python.h\ncuda: not built: no nvcc\n"
    )
    monkeypatch.setattr(_ffi, "_modules", {})
    libraries = _ffi._load("cpu"), _ffi._load("CUDA")
    monkeypatch.setattr(_ffi, "LIBRARIES", libraries)
    return tmp_path


@NATIVE
def test_ops_on_cpu():
    rows = by_name(_machine.active_ops("cpu"))
    assert {name for name, row in rows.items() if row["custom_call"]} == ON_CPU
    for name, row in rows.items():
        assert row["why"] == ("" if name in ON_CPU else "no kernel for cpu"), name


def test_a_machine_with_amds_gpus(monkeypatch, few_programs):
    """JAX calls their backend "gpu", for which nothing can be lowered."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = _machine.about()
    assert found["platform"] == "rocm"
    assert [row["why"] for row in found["ops"]] == ["no kernel for rocm"]


def test_tpus():
    """Products of blocks are refused there, which takes no other row away."""
    ops = by_name(_machine.active_ops("tpu"))
    assert {name for name, row in ops.items() if row["why"] != "no kernel for tpu"} == {
        "block_scaled_matmul"
    }
    assert ops["block_scaled_matmul"]["why"].startswith(
        "no kernel for tpu, which refuses it: block_scaled_matmul: expected one scale"
    )


def test_the_report_of_a_tpu(few_programs):
    about = _machine.about() | {"ops": _machine.active_ops("tpu"), "platform": "tpu"}
    said = "0 ops run their kernel, 0 do not, 1 have none for tpu"
    assert f"kernels\n  {said}\n" in command.text(about)


@NATIVE
@pytest.mark.parametrize("disabled", [False, True])
def test_a_healthy_cpu_reads_as_healthy(monkeypatch, few_programs, disabled):
    """Products without an FP8 kernel are intended on a CPU; a kernel that is switched
    off is not.
    """
    monkeypatch.setattr(
        _op_calls,
        "OPS",
        {name: OPS[name] for name in ("amax", "scaled_matmul")},
    )
    if disabled:
        monkeypatch.setattr(_support, "_disabled", frozenset({"amax"}))
    printed = command.text(_machine.about() | {"platform": "cpu"})
    row = "scaled_matmul False no kernel for cpu".split()
    assert printed.splitlines()[-1].split() == row
    counts = f"{1 - disabled} ops run their kernel, {1 * disabled} do not"
    assert printed.startswith(f"kernels\n  {counts}, 1 have none for cpu\n")


@pytest.mark.parametrize(
    "capability, ops", [("9.0", []), ("10.0", ["block_scaled_matmul"])]
)
def test_capable_gpus(machine, capability, ops):
    """Which ops do not run there."""
    machine(gpu(capability))
    rows = by_name(_machine.active_ops("cuda"))
    idle = [name for name, row in rows.items() if row["why"] or not row["custom_call"]]
    assert idle == [*cases.CPU_ONLY, *ops]
    assert all(rows[op]["why"].startswith(f"{op}: cuBLASLt multiplies") for op in ops)


def test_a_gpu_without_fp8(machine, few_programs):
    machine(gpu("8.0"))
    rows = _machine.active_ops("cuda")
    reason = "A fake GPU has compute capability 8.0, FP8 needs 8.9 or newer"
    assert {row["why"] for row in rows} == {reason}
    assert not any(row["custom_call"] for row in rows)


def test_a_gpu_without_cublaslt(machine):
    machine(gpu("9.0"), cublaslt="libcublasLt.so.13: cannot open")
    rows = by_name(_machine.active_ops("cuda"))
    without = dict.fromkeys(
        ("scaled_matmul", "block_scaled_matmul"), "libcublasLt.so.13: cannot open"
    )
    without |= dict.fromkeys(cases.CPU_ONLY, "no kernel for cuda")
    assert {name: row["why"] for name, row in rows.items() if row["why"]} == without
    with pytest.raises(RuntimeError, match=r"libcublasLt.so.13: cannot open"):
        _machine.cublaslt()


@pytest.mark.parametrize(
    "version, shown",
    [(130002, "13.0.2 (libcublasLt.so.13)"), (120905, "12.9.5 (libcublasLt.so.12)")],
)
def test_which_cublaslt(version, shown, machine, few_programs, monkeypatch):
    machine(gpu("9.0"))
    monkeypatch.setattr(_ffi, "cublaslt_version", lambda: version)
    monkeypatch.setitem(_ffi._modules, "cuda", None)
    assert f"\ncublaslt\n  {shown}\n" in command.text(_machine.about())


def test_asking_takes_no_warning_away(machine):
    """A program lowered later warns as if nobody had asked."""
    machine(gpu("8.0"))
    _machine.active_ops("cuda")
    function, arguments = _op_calls.call("amax", _machine.EXAMPLE)
    with pytest.warns(RuntimeWarning, match=r"capability 8\.0"):
        cuda_text(function, *arguments)


def test_no_libraries(no_libraries, few_programs):
    cpu, cuda = _ffi.LIBRARIES
    assert cpu.error == "not built: no Python.h" and cpu.path is None
    assert cuda.error == "not built: no nvcc" and cuda.built_for == ""
    rows = _machine.active_ops("cpu")
    assert {row["why"] for row in rows} == {f"the native library: {cpu.error}"}
    about = _machine.about()
    assert about["cublaslt"] == {
        "error": "RuntimeError: not looked for: there is no CUDA library, or no NVIDIA "
        "GPU"
    }
    printed = command.text(about)
    for library in cpu, cuda:
        assert re.search(f"  {library.platform} +- +- +{library.error}\n", printed)


def test_a_damaged_library(no_libraries, few_programs, caplog, monkeypatch):
    path = no_libraries / "_cpu.so"
    path.write_bytes(b"not a library")
    library = _ffi._load("cpu")
    monkeypatch.setattr(_ffi, "LIBRARIES", [library])
    assert library.path == os.fspath(path)
    assert library.error.startswith("does not load: ")
    assert f"{path}  does not load: " in command.text(_machine.about())
    assert f"ignoring {path}, which does not load" in caplog.text


def test_a_broken_part_is_a_line(monkeypatch, capsys):
    def broken():
        raise OSError("no such thing")

    for module, name in (
        (_machine, "devices"),
        (_machine, "processor"),
        (_support, "backend"),
    ):
        monkeypatch.setattr(module, name, broken)
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert "devices\n  OSError: no such thing\n" in printed
    assert "processor\n  OSError: no such thing\n" in printed
    assert "platform\n  OSError: no such thing\n" in printed
    assert "ops\n  OSError: no such thing\n" in printed


@pytest.mark.parametrize(
    "platform", [pytest.param("cpu", marks=pytest.mark.slow), "cuda"]
)
def test_in_a_process_of_its_own(platform):
    """As a user runs it. Where JAX is told to use GPUs and finds none, what it says is
    in the report.
    """
    if platform == "cuda" and _support.local_gpus():
        pytest.skip("there are GPUs")
    names = [name for name in os.environ if name.startswith(("JAX", "XLA_"))]
    environment = dict.fromkeys(names) | {"JAX_PLATFORMS": platform}
    done = another_process.python(
        "-m", "jaxfp8", PYTHONPATH=another_process.PATH, **environment
    )
    assert f"  JAX_PLATFORMS  {platform}\n" in done.stdout
    found = r".*\n  1 +cpu +cpu +-$" if platform == "cpu" else r"  \w+(Error|Exception)"
    assert re.search(rf"^devices\n{found}", done.stdout, re.MULTILINE)
