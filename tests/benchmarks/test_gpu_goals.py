"""Goals from results: ratios, peers that are none, and what was not measured."""

NAME = "_gpu_goals"


def goals_of(program, cases):
    return {goal.what: goal for goal in program.goals(cases, False)}


def dense(**rows):
    made = {
        name.replace("_", " "): {"us": us, "gemms": {kind: 3}}
        for name, (us, kind) in rows.items()
    }
    return {"dense": {"rows": made, "errors": {}}}


def test_the_faster_peer_counts(program):
    cases = dense(jaxfp8_own=(100, "fp8 jaxfp8"), bf16=(200, "bf16 triton"))
    cases["dense"]["rows"]["bf16, no triton"] = {
        "us": 160,
        "gemms": {"bf16 cublaslt": 3},
    }
    goal = goals_of(program, cases)["Dense, own, to bf16"]
    assert goal.value == 1.6 and goal.met == "met"


def test_a_peer_in_bf16_is_no_peer(program):
    cases = dense(jaxfp8_own=(100, "fp8 jaxfp8"), flax=(200, "bf16 triton"))
    goal = goals_of(program, cases)["Dense, own, to Flax"]
    assert goal.value is None and "no FP8 GEMM" in goal.met
    cases["dense"]["rows"]["flax, no triton"] = {
        "us": 300,
        "gemms": {"fp8 cublaslt": 3},
    }
    assert goals_of(program, cases)["Dense, own, to Flax"].value == 3
