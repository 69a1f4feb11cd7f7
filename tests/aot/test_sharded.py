"""A gated MLP on eight H200s, FSDP and data x tensor parallel, one and a scan over
eight: collectives, bytes, GEMMs.
"""

import jax
import pytest

from .results import ours, test_the_counts_are_those_of_the_programs  # noqa: F401

GROUP = "sharded"
MIB = 2**20
CASES = ("fsdp-8", "dp x tp", "fsdp-8 scan")
KERNELS = 3 * 4096 * 14336  # elements of gate, up and down
# in a loop again for the backward: shards are kept until then
GATHERED = {"fsdp-8": 1, "fsdp-8 scan": 2 * 8}


def of_kind(found, *kinds) -> list:
    return [c for c in found["collectives"] if c["kind"] in kinds]


def amaxes(found) -> list:
    return [c for c in found["collectives"] if c["reducer"] == "maximum"]


@pytest.mark.parametrize("case, times", GATHERED.items())
def test_kernels_are_gathered_in_fp8(counts, case, times):
    """One layout of each: a byte an element."""
    for name, found in ours(counts, case).items():
        gathers = of_kind(found, "all-gather")
        assert {dtype for c in gathers for dtype in c["dtypes"]} == {"f8e4m3fn"}, name
        assert sum(c["times"] * c["bytes"] for c in gathers) == times * KERNELS, name


@pytest.mark.parametrize("case", CASES)
def test_no_other_kind_of_collective(counts, case):
    """Those of bf16's program and the amaxes."""
    kinds = {c["kind"] for c in counts[case]["bf16"]["collectives"]}
    for name, found in ours(counts, case).items():
        assert {
            c["kind"] for c in found["collectives"] if c not in amaxes(found)
        } <= kinds, name


@pytest.mark.parametrize(
    "case, limit", [("fsdp-8", 1), ("dp x tp", 3), ("fsdp-8 scan", 2)]
)
def test_amax_all_reduces(counts, case, limit):
    """Of a step. In a loop each counts as often as it runs: XLA moves those of readings
    out of it.

    The amaxes of x and the kernel are known in the forward, that of the gradient in the
    backward.
    """
    for name, found in ours(counts, case).items():
        if not name.endswith("bare"):
            assert sum(c["times"] for c in amaxes(found)) <= limit, (
                name,
                amaxes(found),
            )


@pytest.mark.parametrize("name", ["own", "fused", "drop-in"])
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
    for name in ("own", "fused", "drop-in"):
        found = counts["fsdp-8 scan"][name]["timeline"]["perturbed_ms"]
        for rates, milliseconds in found.items():
            assert milliseconds < 0.75 * bf16[rates], (name, rates)


# The most launches, on JAX 0.10 and on JAX 0.12.
LAUNCHES = {"own": (651, 579), "fused": (437, 389), "drop-in": (643, 595)}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_scan(counts, name):
    assert (
        counts["fsdp-8 scan"][name]["launches"]
        <= LAUNCHES[name][jax.__version_info__ >= (0, 12)]
    )


def test_gradients_are_reduced_as_elsewhere(counts):
    """The kernel's gradient: of a drop-in in bf16, as Flax's; of our own layers in f32,
    as their kernels are.
    """
    sizes = {
        name: sum(c["times"] * c["bytes"] for c in of_kind(found, "reduce-scatter"))
        for name, found in counts["fsdp-8"].items()
    }
    assert sizes["bf16"] == sizes["flax"] == sizes["drop-in"] == 2 * KERNELS
    assert sizes["own"] == 4 * KERNELS


@pytest.mark.parametrize("name", ["own", "fused"])
def test_gradients_are_reduced_in_their_dtype(counts, name):
    """`wgrad_dtype`: half of the bytes cross devices, and a shard alone is
    converted.
    """
    in_f32, narrow = (
        counts["fsdp-8 scan"][candidate] for candidate in (name, f"{name}, bf16 sums")
    )
    reduced = of_kind(narrow, "reduce-scatter")
    assert {dtype for c in reduced for dtype in c["dtypes"]} == {"bf16"}
    assert sum(c["times"] * c["bytes"] for c in reduced) == 8 * 2 * KERNELS
    assert narrow["bytes"] <= in_f32["bytes"] + 8 * 1.5 * KERNELS
    assert narrow["timeline"]["ms"] < in_f32["timeline"]["ms"]
