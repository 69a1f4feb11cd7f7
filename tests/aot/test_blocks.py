"""Block-scaled products on eight H200s: each device multiplies its shards with the scales of their blocks."""

import json

import pytest

from .products import LAYOUTS, K, M, N

# (m, n, k) of one device.
SHARDS = {
    "rows": (M // 8, N, K),
    "columns": (M, N // 8, K),
    "both": (M // 4, N // 2, K),
    "contracted": (M, N, K // 8),
}


@pytest.fixture(scope="module")
def report(on_h200):
    return json.loads(on_h200("blocks"))


def scales(scaling, m, n, k):
    """Of a and b, in cuBLASLt's layouts."""
    if scaling == "rows":
        return (1, m), (1, n)
    blocks = k // 128
    return (1, blocks, m), (1, n // 128, -(-blocks // 4) * 4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", ["blocks", "rows"])
def test_products_of_shards(report, scaling, layout):
    found = report[f"{scaling} {layout}"]
    m, n, k = SHARDS[layout]
    shapes = [(1, m, k), (1, n, k), *scales(scaling, m, n, k)]
    dtypes = ["f8e4m3fn", "f8e4m3fn", "f32", "f32"]
    expected = [[dtype, ",".join(map(str, shape))] for dtype, shape in zip(dtypes, shapes, strict=True)]
    assert found == {"operands": [expected], "gathers": 0}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mx_is_the_reference_on_hopper(report, layout):
    assert report[f"MX {layout}"]["operands"] == []
