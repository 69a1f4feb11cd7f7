"""The products that autotune measures for a mesh: those of one device's shards."""

import json

import pytest

from .products import LAYOUTS, K, M, N


@pytest.fixture(scope="module")
def report(on_h200):
    return json.loads(on_h200("products"))


SHARDS = {
    "rows": (M // 8, N, K),
    "columns": (M, N // 8, K),
    "both": (M // 4, N // 2, K),
    "contracted": (M, N, K // 8),
    "shard_map": (M // 8, N, K),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, "shard_map"])
def test_products_of_shards(report, layout):
    (gemm,) = report["found"][layout]
    sizes = list(SHARDS[layout])
    assert gemm == [1, *sizes, "f8e4m3fn", "f8e4m3fn", "f32", False, False, False, 32 << 20, 256]


def test_ops_ask_the_devices_of_the_program(report):
    """Not those of the machine that compiles: every op was lowered for eight H200s."""
    assert len(report["asked"]) % 8 == 0 and report["asked"]
    assert all(device == ["NVIDIA H200", "9.0"] for device in report["asked"])
