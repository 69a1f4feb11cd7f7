"""What a step holds at its peak: how XLA's dumps are read, and the committed bytes and
the page that quotes them.
"""

import json

from . import memory
from .results import ROOT

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}:
 value: <0 x.1 @0> (size=64,offset=0): f32[16]{0}
allocation 1: size 4096, preallocated-temp:
 value: <1 call.2{} @0> (size=16,offset=0): (f8e4m3fn[8192,2]{1,0}, f32[1]{0})
 value: <2 call.2{0} @0> (size=1000,offset=16): f8e4m3fn[8,8192,2]{2,1,0}
 value: <3 call.2{1} @0> (size=300,offset=1016): f8e4m3fn[2,8192]{1,0}
 value: <8 update.9 @0> (size=4000,offset=4096): f8e4m3fn[8,2,8192]{2,1,0}
 value: <4 fusion.3 @0> (size=500,offset=2016): bf16[8192,2]{1,0}
 value: <5 fusion.4 @0> (size=700,offset=2016): f32[8192,2]{1,0}
 value: <6 call.5 @0> (size=20,offset=3000): f8e4m3fn[4096,4096]{1,0}
 value: <7 call.6 @0> (size=1,offset=3100): u8[9]{0}
allocation 2: size 4, maybe-live-out:
"""
LIVE = """  BufferLiveRange:
    x.1{}:0-9
    call.2{}:1-2
    call.2{0}:1-7
    call.2{1}:2-5
    fusion.3{}:2-3
    fusion.4{}:4-6
    call.5{}:5-8
    call.6{}:6-8
    update.9{}:1-3
    while.1{}:3-3
    while.1{0}:3-3
    while.1{1}:3-6
"""
PROGRAM = """
  %while.1 = (s32[], /*index=1*/f8e4m3fn[8,2,8192]{2,1,0}) while(%tuple.4), condition=%condition, body=%body
"""  # noqa: E501


def test_the_peak():
    """At 5 codes, their transposes, float32, codes of a kernel and a loop's stack are
    alive; bf16 is not any more.
    """
    kinds = {
        "codes": 1000,
        "transposed codes": 4300,
        "f32": 700,
        "codes of kernels": 20,
    }
    assert memory.held(ASSIGNMENT, LIVE, PROGRAM) == kinds


def test_committed_bytes():
    """Kinds are a peak but for gaps. Experts hold less than in bf16, GatedMLP with FP8
    kept less than half of it.
    """
    models = json.loads(
        (ROOT / "benchmarks" / "results" / "memory_h200.json").read_text()
    )["models"]
    page = (ROOT / "docs" / "performance.md").read_text()
    for model, candidates in models.items():
        bf16 = candidates["bf16"]["temporary_bytes"]
        for found in candidates.values():
            held = found["held"]
            peak = found["temporary_bytes"]
            assert 0.98 * peak < sum(held.values()) <= peak, model
            assert f"| {peak / 2**20:.0f} | {peak / bf16:.2f} |" in page
    experts = models["experts"]
    llama = models["llama"]
    assert experts["fused"]["temporary_bytes"] < experts["bf16"]["temporary_bytes"]
    assert (
        llama["fused, FP8 kept"]["temporary_bytes"]
        <= 0.5 * llama["bf16"]["temporary_bytes"]
    )
