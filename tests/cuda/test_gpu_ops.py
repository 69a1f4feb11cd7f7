"""The CUDA kernels on a GPU beside tests/ops, which runs there too: repeatability,
graph capture, threads, and sizes above 2**31. Products are in test_gpu_products.py.
"""

import concurrent.futures
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_all_bitwise

from jaxfp8 import ops
from jaxfp8.inspect import _machine, _op_calls
from jaxfp8.ops import _ffi

from .gpu import GRAPHS, custom_calls as custom_calls

pytestmark = pytest.mark.gpu


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """The last elements of a tensor that 32-bit offsets do not reach."""
    size = 2**31 + 4096 + 5
    x = jnp.ones((size,), jnp.bfloat16).at[-1].set(-3)
    data, top = ops.quantize(x, np.float32(2), jnp.float8_e4m3fn)
    assert float(top) == 3 and float(data[-1]) == -6
    assert bool(jnp.all(data[-5000:-1].astype(jnp.float32) == 2))


CALLS = [_op_calls.call(op, _machine.EXAMPLE) for op in _ffi._TARGETS["CUDA"]]
ARGUMENTS = [arguments for _, arguments in CALLS]


def every_op(arguments):
    pairs = zip(CALLS, arguments, strict=True)
    return jax.tree.leaves([function(*given) for (function, _), given in pairs])


def test_same_bytes_every_time():
    """Repeated runs of one program, as XLA schedules them: with and without command
    buffers.
    """
    plain = jax.jit(every_op, compiler_options={"xla_gpu_enable_command_buffer": ""})
    graph = jax.jit(every_op, compiler_options=GRAPHS)
    expected = [np.asarray(v) for v in plain(ARGUMENTS)]
    for run in (plain, graph):
        for _ in range(5):
            assert_all_bitwise(run(ARGUMENTS), expected, "every op")


@pytest.mark.alone
def test_first_launches_in_graphs(tmp_path):
    """Every op's first launch in a process falls into the capture of a graph: checks of
    the selftest.
    """
    command = [
        sys.executable,
        "-m",
        "jaxfp8.selftest",
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = {
        row["check"]: row["status"]
        for row in json.loads((tmp_path / "found.json").read_text())["rows"]
    }
    assert rows.keys() >= _ffi._TARGETS["CUDA"].keys()
    assert set(rows.values()) == {"passed"}, done.stdout


@pytest.mark.alone
def test_threads():
    """Programs from several host threads at once: shared handles and plans."""
    run = jax.jit(every_op)
    expected = [np.asarray(v) for v in run(ARGUMENTS)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for outputs in pool.map(lambda _: jax.device_get(run(ARGUMENTS)), range(64)):
            assert_all_bitwise(outputs, expected, "every op")
