"""A gated MLP on eight H200s, FSDP and data x tensor parallel, one and a scan over eight: collectives, bytes, GEMMs."""

import pytest

GROUP = "sharded"
MIB = 2**20
CASES = ("fsdp-8", "dp x tp", "fsdp-8 scan")
KERNELS = 3 * 4096 * 14336  # elements of gate, up and down
GATHERED = {"fsdp-8": 1, "fsdp-8 scan": 2 * 8}  # in a loop again for the backward: shards are kept until then


def ours(counts, case) -> dict:
    return {name: found for name, found in counts[case].items() if name not in ("bf16", "flax")}


def of_kind(found, *kinds) -> list:
    return [c for c in found["collectives"] if c["kind"] in kinds]


def amaxes(found) -> list:
    return [c for c in found["collectives"] if c["reducer"] == "maximum"]


@pytest.mark.parametrize("case", CASES)
def test_every_gemm_is_fp8(counts, case):
    for name, found in ours(counts, case).items():
        # In GatedMLP gate and up are one product: two of three are left.
        expected = counts[case]["bf16"]["gemms"] * (2 if name == "fused" else 3) // 3
        assert found["fp8_gemms"] == found["gemms"] == expected, name


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
        assert {c["kind"] for c in found["collectives"] if c not in amaxes(found)} <= kinds, name


@pytest.mark.parametrize("case, limit", [("fsdp-8", 1), ("dp x tp", 3), ("fsdp-8 scan", 2 * 8 + 1)])
def test_amax_all_reduces(counts, case, limit):
    """Of a step. In a loop each counts as often as it runs.

    XLA moves one out that goes into a stacked result as it is. An amax that is not finite is recorded as 0, which is
    only known after the reduction, and that keeps it in the loop: one in the forward body, one in the backward body.
    """
    for name, found in ours(counts, case).items():
        assert sum(c["times"] for c in amaxes(found)) <= limit, (name, amaxes(found))


def test_bytes_of_an_fsdp_layer(counts):
    """The best of ours against Flax's, all of whose quantizers XLA fuses with what is before them."""
    best = min(found["bytes"] for found in ours(counts, "fsdp-8").values())
    assert best <= counts["fsdp-8"]["flax"]["bytes"], best / MIB


def test_gradients_are_reduced_as_elsewhere(counts):
    """The kernel's gradient: of a drop-in in bf16, as Flax's; of our own layers in f32, as their kernels are."""
    sizes = {
        name: sum(c["times"] * c["bytes"] for c in of_kind(found, "reduce-scatter"))
        for name, found in counts["fsdp-8"].items()
    }
    assert sizes["bf16"] == sizes["flax"] == sizes["drop-in"] == 2 * KERNELS
    assert sizes["own"] == 4 * KERNELS
