"""`benchmarks/compare.py` as a user runs it: table, JSON, picture, verdict, options."""

import json
import math
import pathlib

import _compare_plot
import another_process
import compare
import pytest
from _compare_arms import ARMS, FP8_ARMS
from _compare_programs import Program
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


@pytest.mark.parametrize(
    "options, differences, verdict",
    [
        ([], {}, "PASS"),
        ([], {"mxfp8": -0.5, "f16": 1.0, "f32": math.nan}, "PASS"),  # FP8 is judged
        *(([], {name: 0.021}, "FAIL") for name in FP8_ARMS),
        ([], {"block": math.nan}, "FAIL"),
        ([], {"bf16": math.nan}, "FAIL"),
        (["--steps", "999"], {"block": 1.0}, None),
        (["--seeds", "2"], {"block": 1.0}, None),
        (["--arms", "bf16", "block"], {"block": 1.0}, None),
    ],
)
def test_proof_sets_the_exit_status(
    monkeypatch, capsys, tmp_path, options, differences, verdict
):
    memory = {"arguments": 8, "outputs": 4, "aliased": 4, "temporaries": 2}
    fp8 = dict.fromkeys(
        (
            "products",
            "products_by_kernel",
            "products_by_xla",
            "quantizers",
            "quantizers_by_kernel",
        ),
        0,
    )

    def compiled(self):
        self.programs = {name: Program(None, memory, 1, fp8) for name in self.arms}

    def trained(self):
        def run_of(name, seed):
            # One seed alone may be worse: the mean of the differences counts.
            loss = (
                1.3
                + 0.1 * seed
                + differences.get(name, 0.01)
                + (0.03 * (seed - 1) if name != "bf16" else 0)
            )
            return Run(
                step_ms=[9.0, 1.0], train_losses=[4.0, loss], validation=[(2, loss)]
            )

        return [
            {name: run_of(name, seed) for name in self.arms}
            for seed in range(self.args.seeds)
        ]

    differences = {"bf16": 0.0} | differences
    monkeypatch.setattr(compare.Comparison, "compile", compiled)
    monkeypatch.setattr(compare.Comparison, "train", trained)
    monkeypatch.setattr(_compare_plot, "plot", lambda *_: None)
    arguments = [
        "--steps",
        "1000",
        "--seeds",
        "3",
        *options,
        "--out",
        str(tmp_path / "proof.png"),
    ]
    assert compare.main(arguments) == (1 if verdict == "FAIL" else 0)
    last = capsys.readouterr().out.splitlines()[-1]
    if verdict is None:
        assert not last.startswith(("PASS", "FAIL"))
    else:
        assert last.startswith(f"{verdict}: ")
        assert all(f"{name} " in last for name in FP8_ARMS)
