"""Goals from results: ratios, peers that are none, and what was not measured."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def goals():
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from _gpu_goals import goals

    def by_name(cases, dry_run=False):
        return {goal.what: goal for goal in goals(cases, dry_run)}

    return by_name


def dense(**rows):
    made = {name.replace("_", " "): {"us": us, "gemms": {kind: 3}} for name, (us, kind) in rows.items()}
    return {"dense": {"rows": made, "errors": {}}}


def test_the_faster_peer_counts(goals):
    cases = dense(jaxfp8_own=(100, "fp8 jaxfp8"), bf16=(200, "bf16 triton"))
    cases["dense"]["rows"]["bf16, no triton"] = {"us": 160, "gemms": {"bf16 cublaslt": 3}}
    goal = goals(cases)["Dense, own, to bf16"]
    assert goal.value == 1.6 and goal.met == "met"


def test_a_peer_in_bf16_is_no_peer(goals):
    cases = dense(jaxfp8_own=(100, "fp8 jaxfp8"), flax=(200, "bf16 triton"))
    goal = goals(cases)["Dense, own, to Flax"]
    assert goal.value is None and "no FP8 GEMM" in goal.met
    cases["dense"]["rows"]["flax, no triton"] = {"us": 300, "gemms": {"fp8 cublaslt": 3}}
    assert goals(cases)["Dense, own, to Flax"].value == 3
