"""`benchmarks/compare.py` as a user runs it: table, JSON, picture, verdict, options."""

import json
import math
import pathlib

import _compare_report
import another_process
import compare
import pytest
from _compare_arms import ARMS, FP8_ARMS
from _compare_runs import Run

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

HERE = [name for name in ARMS if name != "tf32"]  # a CPU has no TensorFloat-32


def run(folder, *options):
    return another_process.python(
        BENCHMARKS / "compare.py", *options, cwd=folder, XLA_FLAGS=None
    )


@pytest.mark.parametrize(
    "arms",
    [["bf16", "f16", "mxfp8"], pytest.param(HERE, marks=pytest.mark.slow)],
    ids=len,
)
def test_arms_train(tmp_path, arms):
    done = run(
        tmp_path,
        "--tiny",
        "--arms",
        *arms,
        "--json",
        "out/all.json",
        "--out",
        "all.png",
    )
    written = json.loads((tmp_path / "out/all.json").read_text())
    results = written["results"]
    assert list(results) == arms and all(name in done.stdout for name in arms)
    for name, row in results.items():
        # Four steps from the same weights, log(103 characters) = 4.6: the arms agree,
        # and no two of them to the bit.
        assert 4 < row["mean_validation_loss"] < 5 and row["median_ms_per_step"] > 0
        assert abs(row["mean_minus_bf16"]) < 0.1
        memory = row["memory_bytes"]
        assert memory["aliased"] > 0.9 * memory["outputs"], "the state is donated"
        # Four layers: three products each, and three tensors, each quantized once for
        # both layouts.
        fp8 = row["fp8"]
        expected = 12 if name in FP8_ARMS else 0
        assert fp8["products"] == fp8["quantizers"] == expected
        assert fp8["products_by_kernel"] == 0, "a CPU has no FP8 units"
    assert len({row["mean_validation_loss"] for row in results.values()}) == len(arms)
    assert "12 products of widened codes by XLA:CPU" in done.stdout
    assert "not the speed of FP8 units" in done.stdout
    # four steps prove nothing
    assert "PASS" not in done.stdout and "FAIL" not in done.stdout
    assert written["settings"]["steps"] == 4 and written["machine"]["devices"]
    assert set(written["seeds"][0]) == set(arms)
    picture = (tmp_path / "all.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000


@pytest.mark.parametrize("loss", [math.nan, 4.5])
def test_a_wrong_arm_is_not_timed(monkeypatch, as_users_have_jax, loss):
    args = compare.parse_arguments(["--tiny", "--time-only", "--arms", "bf16", "block"])
    comparison = compare.Comparison(args, compare.Corpus())
    runs = {"bf16": Run(train_losses=[4.61]), "block": Run(train_losses=[loss])}
    monkeypatch.setattr(compare, "train", lambda *_: ({}, runs))
    monkeypatch.setattr(compare, "time_steps", lambda *_: pytest.fail("timed"))
    with pytest.raises(
        AssertionError, match="block: loss .* after 5 steps, expected 4.61"
    ):
        comparison.time()


@pytest.mark.parametrize("wrong", [*FP8_ARMS, None])
def test_the_proof_fails_by_each_arm(wrong):
    """By one that is worse, and by one that is no number."""
    good = {name: {"mean_minus_bf16": 0.01} for name in FP8_ARMS}
    assert _compare_report.judge(good | {"f16": {"mean_minus_bf16": 1.0}})[0]
    for difference in (0.021, math.nan) if wrong else ():
        passed, line = _compare_report.judge(
            good | {wrong: {"mean_minus_bf16": difference}}
        )
        assert not passed and line.startswith("FAIL: ")


def test_a_proof_is_long_and_has_every_arm():
    arms = ["bf16", *FP8_ARMS]
    assert _compare_report.is_proof(1000, 3, arms)
    for less in ((999, 3, arms), (1000, 2, arms), (1000, 3, arms[:-1])):
        assert not _compare_report.is_proof(*less)
