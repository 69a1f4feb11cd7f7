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


def rows(text) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()}


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
    printed = rows(done.stdout)
    assert list(results) == arms and set(arms) <= set(printed)
    for name, row in results.items():
        ms, ratio, peak, kept, loss, difference, skipped = (
            printed[name] if name not in FP8_ARMS else first(done, name)
        )
        assert float(ms) == pytest.approx(row["median_ms_per_step"], abs=0.06)
        assert float(ms) > 0
        bf16 = results["bf16"]
        assert float(ratio) == pytest.approx(
            row["median_ms_per_step"] / bf16["median_ms_per_step"], abs=0.006
        )
        # Four steps from the same weights, log(103 characters) = 4.6: the arms agree,
        # and no two of them to the bit.
        assert float(loss) == pytest.approx(row["mean_validation_loss"], abs=1e-4)
        assert 4 < float(loss) < 5
        assert abs(row["mean_minus_bf16"]) < 0.1
        assert (difference == "-") == (name == "bf16")
        assert skipped == (str(sum(row["skipped"])) if name == "f16" else "-")
        memory = row["memory_bytes"]
        needed = (
            memory["arguments"]
            + memory["outputs"]
            - memory["aliased"]
            + memory["temporaries"]
        )
        assert row["peak_bytes"] == needed
        assert float(peak) == pytest.approx(needed / 2**20, abs=0.06)
        assert memory["aliased"] > 0.9 * memory["outputs"], "the state is donated"
        assert float(kept) == pytest.approx(row["kept_bytes"] / 2**20, abs=0.06)
        # Four layers: three products each, and three tensors, each quantized once for
        # both layouts.
        assert (
            row["fp8"]["products"]
            == row["fp8"]["quantizers"]
            == (12 if name in FP8_ARMS else 0)
        )
        assert row["fp8"]["products_by_kernel"] == 0, "a CPU has no FP8 units"
    assert len({row["mean_validation_loss"] for row in results.values()}) == len(arms)
    assert {
        results[name]["fp8"]["quantizers_by_kernel"]
        for name in {"current", "mxfp8"} & set(arms)
    } == {12}
    assert "12 products of widened codes by XLA:CPU" in done.stdout
    assert "not the speed of FP8 units" in done.stdout
    # four steps prove nothing
    assert "PASS" not in done.stdout and "FAIL" not in done.stdout
    assert written["settings"]["steps"] == 4 and written["machine"]["devices"]
    assert set(written["seeds"][0]) == set(arms)
    picture = (tmp_path / "all.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000


def first(done, name):
    """The line of an arm in the table; a later one says how its products ran."""
    return next(
        line.split()[1:] for line in done.stdout.splitlines() if line.startswith(name)
    )


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
