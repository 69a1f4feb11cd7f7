"""The CUDA kernels on a GPU beside tests/ops, which runs there too: repeatability,
graph capture, threads, and sizes above 2**31. Products are in test_gpu_products.py.
"""

import concurrent.futures
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from ops.cases import random_values

from jaxfp8 import ops
from jaxfp8.ops import _encode_moment, _ffi

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


def chain(x, kernel, scale):
    """Every op once, but amax_to_scale."""
    histories = [jnp.full((4,), 448, jnp.float32)] * 2
    stored = [jnp.reshape(1 / scale, 1)] * 2
    for_x, for_kernel = ops.delayed_scales(histories, stored, fp8_max=(448.0, 448.0))
    q, q_t, top = ops.quantize_transpose(x, scale, jnp.float8_e4m3fn, amax=for_x.amax)
    k, k_top = ops.quantize(
        kernel, for_kernel.scale, jnp.float8_e4m3fn, amax=for_kernel.amax
    )
    y = ops.scaled_matmul(q, k, 1 / scale, for_kernel.scale_inv)
    recorded = [(top, for_x.scale_inv), (k_top, for_kernel.scale_inv)]
    (written,) = ops.write_histories(
        [list(zip(histories, stored, strict=True))], [recorded]
    )
    h = ops.quantize_activation(
        y, scale, jnp.float8_e4m3fn, activation="gelu", amax=top
    )
    dh = ops.quantize_activation_grad(
        y, y, scale, jnp.float8_e5m2, activation="gelu", column_sums=True
    )
    gamma = jnp.ones(y.shape[1:])
    normed = ops.quantize_norm(
        y, gamma, None, scale, jnp.float8_e4m3fn, kind="rms", epsilon=1e-6
    )
    back = ops.dequantize(q_t, 1 / scale, jnp.bfloat16)
    blocks = (len(x), x.shape[1] // _encode_moment.BLOCK)
    moment = q, jnp.ones(blocks), jnp.zeros(blocks, jnp.int8)
    keys = jnp.arange(math.prod(blocks), dtype=jnp.uint32).reshape(blocks)
    encoded = _encode_moment.encode_moment(
        *moment, x.astype(jnp.float32), keys, squared=False, axis=1
    )
    return (
        q_t,
        top,
        k_top,
        y,
        ops.amax(y),
        back,
        *jax.tree.leaves(written),
        *h,
        *dh,
        *normed,
        *encoded,
    )


def chain_inputs():
    return (
        random_values((256, 512), oracle.BF16, 1),
        random_values((384, 512), np.dtype(np.float32), 2),
        np.float32(4),
    )


def test_same_bytes_every_time():
    """Repeated runs of one program, as XLA schedules them: with and without command
    buffers.
    """
    inputs = chain_inputs()
    plain = jax.jit(chain, compiler_options={"xla_gpu_enable_command_buffer": ""})
    graph = jax.jit(chain, compiler_options=GRAPHS)
    expected = [np.asarray(v) for v in plain(*inputs)]
    for run in (plain, graph):
        for _ in range(5):
            assert_all_bitwise(run(*inputs), expected, "chain")


@pytest.mark.alone
def test_first_launches_in_graphs(tmp_path):
    """Every op's first launch in a process falls into the capture of a graph: checks of
    the selftest.
    """
    command = [
        sys.executable,
        "-m",
        "jaxfp8.selftest",
        "--quick",
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    rows = {
        row["check"]: row["status"]
        for row in json.loads((tmp_path / "found.json").read_text())["rows"]
    }
    assert {rows[f"graph:{op}"] for op in _ffi._TARGETS["CUDA"]} == {"passed"}, (
        done.stdout
    )


@pytest.mark.alone
def test_threads():
    """Programs from several host threads at once: shared handles and plans."""
    inputs = chain_inputs()
    run = jax.jit(chain)
    expected = [np.asarray(v) for v in run(*inputs)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for outputs in pool.map(
            lambda _: [np.asarray(v) for v in run(*inputs)], range(64)
        ):
            assert_all_bitwise(outputs, expected, "chain")
