"""The forward pass of a frozen Dense on an H200: one FP8 GEMM, x quantized, and nothing
done to a kernel.

A floor for bytes outside of the GEMM: x is read and its codes are written, 32 + 16 MiB.
"""

import pytest

PROGRAM = "inference"

pytestmark = pytest.mark.slow  # seconds of starting a compiler

MIB = 2**20


@pytest.mark.parametrize(
    "name, launches, mib",
    [
        ("frozen", 2, 48),  # x and the GEMM
        ("frozen drop-in", 2, 48),
        ("frozen current", 4, 80),  # the amax of x, then its scale
        ("frozen row-wise", 2, 49),
        ("frozen block", 3, 50),  # scales in the order that cuBLASLt wants
    ],
)
def test_frozen(report, name, launches, mib):
    found = report[name]
    assert found["gemms"] == found["fp8_gemms"] == 1
    assert found["launches"] <= launches and not found["conditionals"], found["kinds"]
    assert 48 * MIB <= found["bytes"] <= mib * MIB + 1024, (
        "no kernel is quantized or transposed"
    )
    assert 64 * MIB <= found["weights"] <= 64.1 * MIB
