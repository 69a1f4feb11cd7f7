"""What is in a step by our trainers, beside Flax's on the same model: the cases of
benchmarks/trainers.py.
"""

import re

import pytest
from promotion import as_users_have_jax


@pytest.fixture(scope="module")
def trainers():
    with as_users_have_jax():
        import trainers

        yield trainers


def traced_and_operations(step, arguments):
    traced = step.trace(*arguments)
    text = traced.lower().as_text()
    assert "callback" not in text
    traced = getattr(traced, "traced", traced)  # of nnx.jit's
    return traced, len(re.findall(r"^\s+%\S+ = ", text, re.MULTILINE))


@pytest.mark.filterwarnings("ignore:the parameters were updated")
@pytest.mark.parametrize(
    "case",
    [
        "README's program",
        "12 layers",
        "12 layers, NNX",
        "12 layers, four microbatches",
    ],
)
def test_no_effects_and_few_operations(trainers, case):
    goals = trainers.ACCUMULATION_GOALS if case == trainers.MICRO else trainers.GOALS
    found = {
        name: traced_and_operations(*candidate)
        for name, candidate in trainers.CASES[case]().items()
    }
    for name, (traced, operations) in found.items():
        assert not traced.jaxpr.effects, name
        if trainers.is_ours(name):
            assert operations <= goals["operations"] * found["flax"][1], name


def test_a_case_runs(trainers):
    """Losses of all trainers agree, and every row has its numbers."""
    trainers.CASES = {"two layers": lambda: trainers.linen((8, 8))}
    rows = trainers.measure("two layers", turns=2)
    assert [row["candidate"] for row in rows] == [
        "bf16",
        "flax's FP8",
        "flax",
        "linen.TrainState",
        "train.optimizer",
    ]
    assert all(
        row["step_ms"] >= row["host_ms"] > 0
        and row["compile_ms"] > 0
        and not row["effects"]
        for row in rows
    )
    assert all(trainers.line(row) for row in rows)
