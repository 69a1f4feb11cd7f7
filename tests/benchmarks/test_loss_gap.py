"""The program of the loss gap: its runs and their files, its figures by hand, its own
quantizer.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

NAME, SIZES = "loss_gap", {"BATCH": 2, "LENGTH": 16, "WIDTH": 32}
CHANGED = {
    "only_input": [True, False, True],
    "input_in_fprop": [True, False, False],
    "input_in_wgrad": [False, False, True],
    "only_kernel": [True, True, False],
    "only_grad": [False, True, True],
    "all_but_input": [True, True, True],
    "delayed": [True, True, True],
}

pytestmark = pytest.mark.usefixtures("as_users_have_jax")


def test_runs_are_paired_and_kept(program, tmp_path, monkeypatch, capsys):
    arms = ["bf16", "delayed", "flax", "ends_in_bf16", "last_20"]
    corpus = program.corpora()["source"]
    corpus.validation = corpus.validation[:200]
    monkeypatch.setattr(program, "corpora", lambda: {"source": corpus})
    options = [
        "--arms",
        *arms,
        "--texts",
        "source",
        "--seeds",
        "2",
        "--steps",
        "3",
        "--runs",
        str(tmp_path / "runs.jsonl"),
    ]
    assert program.main(options) == 0
    runs = [
        json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()
    ]
    assert [(run["arm"], run["seed"]) for run in runs] == [
        (arm, seed) for seed in (0, 1) for arm in arms
    ]
    for run in runs:
        assert (run["text"], run["steps"]) == ("source", 3)
        assert [step for step, _ in run["curve"]] == [1, 2, 3]
        assert run["curve"][-1][1] == run["validation"]
        assert all(3 < loss < 6 for _, loss in run["curve"])
        assert {
            "commit",
            "jax",
        } <= set(run["environment"])
        assert run["served"]["bf16"] != run["served"]["fp8"]
    # Its first two steps are those of delayed scaling, and the third is another.
    whole, tail = (runs[i]["curve"] for i in (1, 4))
    assert whole[:2] == tail[:2] and whole[2] != tail[2]
    # What is there is not run again: the report has the same table.
    monkeypatch.setattr(program.Training, "run", lambda *_: pytest.fail("run again"))
    first = capsys.readouterr().out
    written = tmp_path / "all.json"
    assert program.main([*options, "--json", str(written)]) == 0
    assert program.main([*options, "--report"]) == 0
    assert capsys.readouterr().out == 2 * first
    rows = json.loads(written.read_text())["results"]["source"]
    assert list(rows) == arms and rows["flax"]["difference"]["seeds"] == 2
    losses = [row["validation"] for row in rows.values()]
    assert len({loss for pair in losses for loss in pair}) == 10, (
        "no two arms, and no two seeds, are the same run"
    )


def test_the_docs_have_the_figures(program):
    root = Path(__file__).parents[2]
    results = json.loads(
        (root / "benchmarks" / "results" / "loss_gap.json").read_text()
    )["results"]
    recipes = (root / "docs" / "recipes.md").read_text()
    assert program.table(results, program.RECIPES) in recipes
    losses = (root / "benchmarks" / "losses.md").read_text()
    assert program.table(results, program.ABLATION) in losses
    assert program.served_table(results) in losses
    # The figures are those of the runs.
    again = program.figures(program.found_runs(program.RUNS, program.STEPS))
    assert json.loads(json.dumps(again)) == results


def test_each_arm_quantizes_what_it_says(program):
    """Of y, the gradient of x and that of the kernel: those that a quantizer alone
    leaves as they are, to the bit.
    """
    x, grad = (
        jax.random.normal(jax.random.key(i), (32, 32), jnp.bfloat16) for i in (0, 1)
    )

    def results(name):
        with program.ARMS[name].precision.region():
            layer = program.ARMS[name].dense(32, use_bias=False, dtype=jnp.bfloat16)
            variables = layer.init(jax.random.key(2), x)
            y, vjp = jax.vjp(layer.apply, variables, x)
            dvariables, dx = vjp(grad)
        return y, dx, dvariables["params"]["kernel"]

    exact = results("no_quantizer")
    changed = {
        name: [
            not np.array_equal(a, b) for a, b in zip(results(name), exact, strict=True)
        ]
        for name in CHANGED
    }
    assert changed == CHANGED
