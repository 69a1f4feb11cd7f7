"""What compute-sanitizer is to look at: every custom call, in programs that run; and how it is called."""

import subprocess
import sys

import jax
import pytest

from jaxfp8 import ops

from . import sanitize, sanitizer_cases

CASES = sanitizer_cases.OWN | sanitizer_cases.CUBLASLT


def test_every_custom_call(cuda_custom_calls):
    """Of what the ops lower to. Counting is a variant of kernels that are there."""
    text = ""
    for function, *arguments in CASES.values():
        text += jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    missing = [name for name in ops.custom_call_targets() if name not in text]
    assert all("counted" in name for name in missing), missing


@pytest.mark.slow
def test_cases_run():
    """On a CPU here; in a process of its own, as on a GPU."""
    done = subprocess.run(
        [sys.executable, sanitize.CASES, "--own"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines() == list(sanitizer_cases.OWN)


SANITIZER = """#!/bin/sh
echo "$XLA_PYTHON_CLIENT_ALLOCATOR: $*"
case "$*" in *racecheck*) exit 9;; esac
"""


def test_calls(tmp_path, monkeypatch, capfd):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    assert sanitize.main() == 1
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("platform: ")]
    assert [line.split()[2] for line in lines] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert all("sanitizer_cases.py" in line and "--error-exitcode 9" in line for line in lines)
    # initcheck knows the writes of kernels that it looks at only: no filter, and no kernels but XLA's and ours.
    assert ["kns=jaxfp8" in line for line in lines] == [False, True, False, True]
    assert [line.endswith("--own") for line in lines] == [False, True, True, True]
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "memcheck"])
    assert sanitize.main() == 0


def test_without_the_tool(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert sanitize.main() == 2 and "compute-sanitizer not found" in capsys.readouterr().out
