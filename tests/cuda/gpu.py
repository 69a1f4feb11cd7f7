"""What the tests on a GPU share."""

import jax
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
