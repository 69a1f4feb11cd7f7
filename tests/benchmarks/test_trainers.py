"""A case of benchmarks/trainers.py."""

import pytest
from promotion import as_users_have_jax


@pytest.fixture(scope="module")
def trainers():
    with as_users_have_jax():
        import trainers

        yield trainers


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
