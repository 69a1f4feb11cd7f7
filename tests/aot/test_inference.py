"""The forward pass of a frozen Dense on an H200: one FP8 GEMM, x quantized, and nothing
done to a kernel.

A floor for bytes outside of the GEMM: x is read and its codes are written, 32 + 16 MiB.
"""

import pytest

PROGRAM = "inference"

pytestmark = pytest.mark.slow  # seconds of starting a compiler

MIB = 2**20


def test_the_counts_of_others_are_known(report):
    """bf16 is its GEMM. A layer as it was trained reads scales, quantizes x and a
    float32 kernel, and multiplies.

    For x and the kernel each two launches find out that there is an amax, and two copy
    a scale out of the conditional.
    """
    bf16 = report["bf16"]
    trained = report["fp8"]
    assert (bf16["launches"], bf16["bytes"], bf16["fp8_gemms"], bf16["weights"]) == (
        1,
        0,
        0,
        128 * MIB,
    )
    assert trained["launches"] == 4 + 2 * 4 and trained["fp8_gemms"] == 1
    assert trained["kinds"]["custom-call"] == 4 and trained["conditionals"] == 2
    # The kernel: 256 MiB in, and 64 out in both layouts, of which the forward pass
    # reads one.
    assert trained["bytes"] // MIB == 48 + 256 + 2 * 64


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
