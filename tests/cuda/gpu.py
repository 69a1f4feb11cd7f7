"""What the tests on a GPU share, and random operands."""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

# XLA records custom calls that allow it into CUDA graphs, also when there is only one.
GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL",
    "xla_gpu_graph_min_graph_size": 1,
}


@pytest.fixture(autouse=True)
def custom_calls():
    """Every op of these tests is the custom call on the first GPU."""
    with jax.default_device(jax.devices("gpu")[0]), ops.implementation("ffi"):
        yield


def random_values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (
        (rng.standard_normal(shape) * 2.0 ** rng.uniform(-12, 9, shape))
        .astype(np.float32)
        .astype(dtype)
    )


def random_codes(shape, fmt, seed=0):
    return oracle.quantize(
        np.random.default_rng(seed).standard_normal(shape), np.float32(fmt.max / 8), fmt
    )[0]
