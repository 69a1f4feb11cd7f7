"""The products of a mesh are those of each device's shards, with the scales of their
blocks.
"""

import pytest

from .products import FEW_K, LAYOUTS, K, M, N

PROGRAM = "products"

# (m, n, k) of one device.
SHARDS = {
    "rows": (M // 8, N, K),
    "columns": (M, N // 8, K),
    "both": (M // 4, N // 2, K),
    "contracted": (M, N, K // 8),
    "shard_map": (M // 8, N, K),
}


@pytest.mark.parametrize("layout", SHARDS)
def test_products_of_shards(report, layout):
    ((a, b, *scales),) = report["found"][layout]
    m, n, k = SHARDS[layout]
    assert (a, b) == (["f8e4m3fn", [m, k]], ["f8e4m3fn", [n, k]])
    assert scales == [["f32", [1]]] * 2


def test_ops_ask_the_devices_of_the_program(report):
    """Not those of the machine that compiles: every op was lowered for eight H200s."""
    assert len(report["asked"]) % 8 == 0 and report["asked"]
    assert all(device == ["NVIDIA H200", "9.0"] for device in report["asked"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", ["blocks", "rows"])
def test_block_scaled_products_of_shards(report, scaling, layout):
    """With scales in cuBLASLt's layouts."""
    (m, n, k) = SHARDS[layout]
    blocks = SHARDS[layout][2] // 128
    scales = (
        ((1, m), (1, n))
        if scaling == "rows"
        else ((1, blocks, m), (1, n // 128, -(-blocks // 4) * 4))
    )
    shapes = [(m, k), (n, k), *scales]
    dtypes = ["f8e4m3fn", "f8e4m3fn", "f32", "f32"]
    expected = [
        [dtype, list(shape)] for dtype, shape in zip(dtypes, shapes, strict=True)
    ]
    assert report["blocks"][f"{scaling} {layout}"] == {
        "operands": [expected],
        "gathers": 0,
    }


def test_blocks_that_some_devices_divide(report):
    """Four pairs of devices have whole blocks of the contraction: no device multiplies
    all of it.
    """
    ((a, b, *_),) = report["few"]["operands"]
    assert (a, b) == (["f8e4m3fn", [M, FEW_K // 4]], ["f8e4m3fn", [N, FEW_K // 4]])
