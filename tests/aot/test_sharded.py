"""A gated MLP on eight H200s, FSDP and data x tensor parallel, one and a scan over
eight: collectives, bytes, GEMMs.
"""

import pytest

from .results import test_the_counts_are_those_of_the_programs  # noqa: F401

GROUP = "sharded"
OURS = ("own", "fused", "drop-in")
KERNELS = 3 * 4096 * 14336  # elements of gate, up and down
# in a loop again for the backward: shards are kept until then
GATHERED = {"fsdp-8": 1, "fsdp-8 scan": 2 * 8}


@pytest.mark.parametrize("case, times", GATHERED.items())
def test_kernels_are_gathered_in_fp8(counts, case, times):
    """One layout of each: a byte an element."""
    for name in OURS:
        collectives = counts[case][name]["collectives"]
        gathers = [c for c in collectives if c["kind"] == "all-gather"]
        assert {dtype for c in gathers for dtype in c["dtypes"]} == {"f8e4m3fn"}, name
        assert sum(c["times"] * c["bytes"] for c in gathers) == times * KERNELS, name


@pytest.mark.parametrize("name", OURS)
def test_a_profile_hides_the_collectives_of_a_scan(counts, name):
    """XLA's scheduler takes a custom call for free, and starts collectives where
    nothing is beside them, unless a profile says how long each call takes.

    By the time line, at most 2.5 of 66 to 83 ms are left.
    """
    found = counts["fsdp-8 scan"][name]["profiled"]
    assert found["ms"] - found["hidden_ms"] <= 2.5, found
    assert found["ms"] < counts["fsdp-8 scan"][name]["timeline"]["ms"]


def test_fp8_is_faster_than_bf16_at_other_rates(counts):
    """Of a scan on eight devices, by the time line, whatever wire and memory are."""
    bf16 = counts["fsdp-8 scan"]["bf16"]["timeline"]["perturbed_ms"]
    for name in OURS:
        found = counts["fsdp-8 scan"][name]["timeline"]["perturbed_ms"]
        for rates, milliseconds in found.items():
            assert milliseconds < 0.75 * bf16[rates], (name, rates)
