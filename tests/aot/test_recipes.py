"""Forward and backward of a Dense of 8192^3 on an H200, by recipe: launches, bytes,
reads and FP8 products.

A floor for bytes outside of products: x and grad are read once, 128 MiB each, the
kernel's 256, and the codes of both layouts written, 64 MiB each: 896. Scales are 2 to
16 MiB a layout where blocks are small.
"""

import pytest

GROUP = "recipes"
CASE = "dense by recipe"
MIB = 2**20
GOALS = {
    # recipe: (launches, MiB, reads of x, kernel and grad)
    "delayed": (8, 896, [1, 1, 1]),
    "current": (12, 1408, [2, 2, 2]),  # the amax, then the scale, then the codes
    # One custom call for each tensor. Of whole rows it is two kernels, which no program
    # shows: 512 MiB more.
    "row-wise": (6, 897, [1, 1, 1]),
    # The scales lie where cuBLASLt reads them: one custom call for each tensor and
    # product.
    "block": (6, 904, [1, 1, 1]),
    "block, power of two": (6, 904, [1, 1, 1]),
    # No tensor core of Hopper's reads such scales: six operands and their scales become
    # bfloat16.
    "MXFP8": (18, 2168, [3, 3, 3]),
    # Three launches that quantize and three products.
    "static": (6, 896, [1, 1, 1]),
    # x is kept as it is, and grad is not transposed: codes of 64 MiB less, each.
    "delayed, wgrad in bf16": (8, 768, [1, 1, 1]),
    # Each operand is read and quantized once for each of its products: three launches
    # and 704 MiB more.
    "one for each product": (11, 1609, [2, 2, 2]),
}
FP8_PRODUCTS = {"MXFP8": 0, "delayed, wgrad in bf16": 2}


@pytest.mark.parametrize("recipe", GOALS)
def test_counts(counts, recipe):
    found = counts[CASE][recipe]
    (launches, mib, reads) = GOALS[recipe]
    assert found["launches"] <= launches, found["kinds"]
    assert found["bytes"] <= (mib + 1) * MIB
    assert found["reads"] == reads


@pytest.mark.parametrize("recipe", GOALS)
def test_products(counts, recipe):
    """In FP8 wherever Hopper multiplies such operands."""
    found = counts[CASE][recipe]
    assert found["gemms"] == 3 and found["fp8_gemms"] == FP8_PRODUCTS.get(recipe, 3)


@pytest.mark.parametrize("recipe", ["row-wise", "block", "static"])
def test_nothing_lies_between_quantization_and_products(counts, recipe):
    assert counts[CASE][recipe]["kinds"] == {"custom-call": 6}


@pytest.mark.parametrize("recipe, launches", [("block", 6), ("MXFP8", 18)])
def test_each_device_quantizes_its_blocks(counts, recipe, launches):
    """Rows of x and grad are cut, whole blocks to a device: one launch more, the sum of
    the kernel's gradient.
    """
    found = counts["on eight devices"][recipe]
    assert [c["kind"] for c in found["collectives"]] == ["all-reduce"]
    assert found["launches"] <= launches + 1


def test_whole_columns_on_a_mesh(counts):
    """XLA reduces the amaxes of columns of x and grad, 32 KiB each; else only the
    kernel's gradient crosses devices.
    """
    collectives = counts["on eight devices"]["row-wise"]["collectives"]
    assert {c["kind"] for c in collectives} == {"all-reduce"}
    *amaxes, gradient = sorted(c["bytes"] for c in collectives)
    assert (sum(amaxes), gradient) == (2 * 4 * 8192, 4 * 8192**2)


def test_a_rule_saves_launches_bytes_and_time(counts):
    """Layers that multiply one x, as one product."""
    apart, joined = (counts["projections"][name] for name in ("apart", "by rule"))
    for key in ("launches", "bytes", "temporary_bytes"):
        assert joined[key] < 0.96 * apart[key], key
    assert joined["timeline"]["ms"] < 0.96 * apart["timeline"]["ms"]
