"""Every op's first launch in a process falls into the capture of a CUDA graph (first_launches.py)."""

import concurrent.futures
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from aot import compiler

from . import first_launches

TESTS = Path(__file__).parents[1]


def run(op: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "cuda.first_launches", op]
    return subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def processes():
    """The process of each op: all at once, because most of it is the start of JAX. Workers of xdist start one each."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = {} if is_worker else {op: pool.submit(run, op) for op in first_launches.CASES}
        yield lambda op: started[op].result() if op in started else run(op)


@pytest.mark.gpu
@pytest.mark.parametrize("op", first_launches.CASES)
def test_first_launch_in_a_graph(processes, op):
    capability = jax.devices("gpu")[0].compute_capability
    if op == "block_scaled_matmul" and capability[0] not in first_launches.BLOCKS:
        pytest.skip(f"cuBLASLt has no products with scales of blocks on compute capability {capability}")
    done = processes(op)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("op", first_launches.CASES)
def test_programs(op):
    """The same programs and checks without a GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        first_launches.check(op)


@pytest.mark.skipif(compiler.missing() is not None, reason=str(compiler.missing()))
def test_programs_become_graphs():
    """XLA puts every custom call of these programs, compiled for an H200, into a graph."""
    assert compiler.run("graphs") == "recorded\n"
