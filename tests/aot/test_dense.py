"""Forward and backward of single layers on an H200: bytes and reads, beside bf16 and
Flax's FP8.

The goals are those of issue 5. A floor for bytes: an FP8 Dense has to read x, kernel
and grad once and write the codes of each twice, for the two GEMMs that read it.
"""

import pytest

from .results import test_the_counts_are_those_of_the_programs  # noqa: F401

GROUP = "dense"
MIB = 2**20
OURS = ("drop-in", "own")
DENSES = ("dense", "dense with bias", "small dense")


@pytest.mark.parametrize("name, mib", [("own", 900), ("drop-in", 1540)])
def test_bytes(counts, name, mib):
    assert counts["dense"][name]["bytes"] <= mib * MIB
    assert counts["dense"][name]["bytes"] < counts["dense"]["flax"]["bytes"]
    # The floor, for a count that misses something: bf16 x and grad, kernel in f32, two
    # codes of each.
    floor = 8192**2 * (2 + 2 + 4 + 3 * 2)
    assert counts["dense"][name]["bytes"] >= floor


@pytest.mark.parametrize("case", ("dense", "small dense"))
@pytest.mark.parametrize("name, reads", [("own", [1, 1, 1]), ("drop-in", [1, 2, 1])])
def test_reads(counts, case, name, reads):
    """Of x, kernel and grad outside of GEMMs; a drop-in's kernel is converted to bf16
    first, by the layer around it.
    """
    assert counts[case][name]["reads"] == reads


@pytest.mark.parametrize("case", DENSES)
def test_residuals_are_the_codes(counts, case):
    """A byte for each element of x and kernel; bf16 keeps two."""
    bf16 = counts[case]["bf16"]["residual_bytes"]
    for name in OURS:
        # Three histories of 1024, a few scales, and a bias.
        assert (
            counts[case][name]["residual_bytes"]
            <= bf16 // 2 + 3 * 4 * 1024 + 4 * 8192 + 100
        )
