"""tools/gpu_session.sh with a Python that does nothing: order, failures, limits and the budget."""

import os
import pathlib
import shutil
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "tools" / "gpu_session.sh"
STEPS = [
    "machine",
    "build",
    "gpu-tests",
    "bench-first",
    "memcheck",
    "racecheck",
    "bench-rest",
    "slow-tests",
    "initcheck",
]
FAKE = """#!/bin/sh
echo "$PWD: $*"
case "$*" in {cases} esac
"""

pytestmark = pytest.mark.skipif(shutil.which("timeout") is None or shutil.which("bash") is None, reason="needs bash")


def session(folder, cases="", budget=100, **environment):
    """Runs the script; returns the process, name -> line of steps.txt, and name -> log."""
    python = folder / "python"
    python.write_text(FAKE.format(cases=cases))
    python.chmod(0o755)
    out = folder / "out"
    done = subprocess.run(
        ["bash", SCRIPT, str(budget)],
        env=os.environ | {"PYTHON": str(python), "OUT": str(out)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    steps = {line.split()[0]: line for line in (out / "steps.txt").read_text().splitlines()}
    return done, steps, {log.stem: log.read_text() for log in out.glob("*.log")}


def test_all_steps_in_order(tmp_path):
    done, steps, logs = session(tmp_path)
    assert done.returncode == 0 and list(steps) == STEPS and set(logs) == set(STEPS)
    assert all(" exit 0 " in line for line in steps.values()), steps
    assert "JAXFP8_CUDA=ON" in logs["build"]
    # Where the sources do not hide the installed package.
    assert all(logs[name].startswith(f"{SCRIPT.parents[1]}/tests:") for name in ("gpu-tests", "memcheck", "slow-tests"))
    assert "-m gpu and not slow" in logs["gpu-tests"] and "--only ceilings gemm" in logs["bench-first"]
    assert done.stdout.endswith("".join(f"{line}\n" for line in steps.values()))


def test_a_failure_stops_nothing_else(tmp_path):
    done, steps, _ = session(tmp_path, cases="*'gpu and not slow'*) echo 3 failed; exit 1;;")
    assert done.returncode == 1 and list(steps) == STEPS
    assert [name for name, line in steps.items() if " exit 0 " not in line] == ["gpu-tests"]
    assert "3 failed" in done.stdout


def test_without_a_build_nothing_is_tested(tmp_path):
    done, steps, _ = session(tmp_path, cases="*install*) exit 2;;")
    assert done.returncode == 1 and list(steps) == ["machine", "build"] and " exit 2 " in steps["build"]


def test_a_step_that_hangs_and_what_no_longer_fits(tmp_path):
    done, steps, _ = session(tmp_path, cases="*'gpu and not slow'*) exec sleep 60;;", budget=8)
    assert done.returncode == 1 and " exit 124 " in steps["gpu-tests"]
    assert "not started: the budget of 8 s is spent" in steps["bench-first"]


def test_chosen_steps(tmp_path):
    _, steps, _ = session(tmp_path, STEPS="gpu-tests bench-rest")
    assert list(steps) == ["gpu-tests", "bench-rest"]
