"""FSDP, tensor and sequence parallel training on eight H200s: what crosses the links,
beside bf16's program.
"""

import math
from collections import Counter

import pytest

from .meshes import LAYOUTS

PROGRAM = "meshes"


def is_amax(collective):
    return (
        collective["kind"] == "all-reduce"
        and {dtype for dtype, _ in collective["results"]} == {"f32"}
        and all(shape in ([6], [4]) for _, shape in collective["results"])
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_all_reduce_for_all_amaxes(report, layout):
    """Six quantizers, one collective of six numbers; four where the kernels are
    replicated.
    """
    amaxes = [c for c in report[f"{layout} fp8"]["collectives"] if is_amax(c)]
    assert len(amaxes) == 1, report[f"{layout} fp8"]["collectives"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathers_move_fp8(report, layout):
    """Kernels and activations cross the links as codes, a byte each; nothing is
    gathered because of a custom call.
    """
    gathers = [
        c for c in report[f"{layout} fp8"]["collectives"] if c["kind"] == "all-gather"
    ]
    assert all(dtype.startswith("f8") for c in gathers for dtype, _ in c["results"]), (
        gathers
    )
    in_bf16 = [
        c for c in report[f"{layout} bf16"]["collectives"] if c["kind"] == "all-gather"
    ]
    # One layout of each, for all products that read it: as many numbers as bf16's
    # program gathers, or fewer.
    ours, theirs = (
        sum(math.prod(shape) for c in of for _, shape in c["results"])
        for of in (gathers, in_bf16)
    )
    assert (ours > 0) == (theirs > 0) and ours <= theirs, (gathers, in_bf16)


def elements(collectives) -> Counter:
    """How many numbers each kind of reduction carries; how they are grouped is up to
    XLA.
    """
    count = Counter()
    for c in collectives:
        if c["kind"] != "all-gather" and not is_amax(c):
            count[c["kind"]] += sum(math.prod(shape) for _, shape in c["results"])
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_other_collective(report, layout):
    """Beside the amaxes and the gathers: the reductions of bf16's program, of as many
    numbers.
    """
    ours, theirs = (
        elements(report[f"{layout} {name}"]["collectives"]) for name in ("fp8", "bf16")
    )
    assert ours <= theirs, (ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gemm_is_fp8_on_shards(report, layout):
    """fprop and wgrad of both layers, dgrad of the second; each operand quantized
    once.
    """
    calls = report[f"{layout} fp8"]["custom_calls"]
    assert calls["scaled_matmul"] == 5
    assert calls["quantize_transpose"] + calls.get("quantize", 0) == 6


# How often each all-reduce of amaxes runs in a scan over eight layers. XLA moves one
# out of a loop for each result that the loop stacks, and the combiner does not merge
# those of two loops, of which the second reads what the first gives.
SCANS = {
    "shard_map, all saved": [1],
    "shard_map, codes saved": [1],
    "shard_map, nothing saved": [1],
    "jit, all saved": [1, 1],
    "jit, codes saved": [1, 1],
    "jit, nothing saved": [1, 8],
}


@pytest.mark.parametrize("name", SCANS)
def test_all_reduces_of_a_scan(report, name):
    assert sorted(report["scan"][name]) == SCANS[name]
