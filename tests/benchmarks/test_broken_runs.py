"""The program of broken runs: its figures by hand, its breaks, a tiny run of all, and
the docs' tables.
"""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8

NAME, SIZES = "broken_runs", {"BATCH": 2, "LENGTH": 8, "WIDTH": 32}
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("as_users_have_jax")


def run(*losses, figures=()):
    return {"loss": list(losses), "figures": list(figures)}


def test_the_rise_of_a_loss(program):
    clean = run(2.0, 2.0, 2.0, 2.0)
    assert program.rise(run(2.0, 2.09, 2.11, 3.0), clean) == 2
    assert program.rise(run(2.0, 1.0, 2.0, 2.05), clean) is None
    # the loss of a skipped step does not count
    assert program.rise(run(None, 2.0, 2.0, 2.2), clean) == 3
    assert program.rise(run(2.0, math.nan, 2.0, 2.0), clean) == 1
    assert program.rise(run(2.0, math.inf, 2.0, 2.0), clean) == 1


def test_exits_from_the_range(program):
    clean = [
        run(figures=[[0.0, 1.0], [0.1, math.nan]]),
        run(figures=[[0.2, 1.5], [0.1, 1.25]]),
    ]
    low, high = program.limits(clean)
    assert (low.tolist(), high.tolist()) == ([0.0, 1.0], [0.2, 1.5])
    broken = run(figures=[[0.2, 1.5], [0.3, 1.0], [0.0, 0.5], [0.3, math.nan]])
    assert program.leaves(broken, low, high) == [1, 2]
    # steps 1 and 3 alone
    assert program.leaves(broken, low, high, every=2) == [1, None]


def test_leads_of_seeds(program):
    assert program.lead([5, 9], [2, 9]) == "+0 to +3"
    assert program.lead([5, 5], [7, None]) == "-2 (1 of 2)"
    # a range that was left in the other seed announces nothing
    assert program.lead([5, None], [None, 2]) == "no"
    assert program.lead([None, None], [3, None]) == "left (1 of 2)"
    assert program.lead([None, None], [3, 0]) == "left"
    assert program.span([None, None]) == "no" and program.span([4, 4]) == "+4"


def test_results_are_of_pairs(program):
    """A clean run is compared with the others, a broken run with that of its seed."""
    clean = [run(2.0, 2.0, figures=[[x] * 6] * 2) for x in (1.0, 2.0, 3.0)]
    broken = [
        run(2.0, 2.5, figures=[[2.0] * 6, [9.0] * 6]),
        run(3.0, 2.0, figures=[[0.5] * 6, [2.0] * 6]),
    ]
    runs = {
        "delayed": {
            i: {"clean": x} | ({"rate": broken[i]} if i < 2 else {})
            for i, x in enumerate(clean)
        },
        "bf16": {0: {"clean": run(2.0, 2.0), "rate": run(2.0, 2.0)}},
    }
    summary = program.results(runs)
    assert summary["range"] == [[1.0] * 6, [3.0] * 6]
    assert (summary["clean runs"], summary["left by others"]) == (3, [2] * 6)
    row = summary["breaks"]["rate"]
    assert (row["smallest"], row["largest"], row["rise"], row["bf16 rise"]) == (
        [0.5] * 6,
        [9.0] * 6,
        [1, 0],
        [None],
    )
    assert row["leaves, every 1"] == [[1] * 6, [0] * 6]
    assert row["leaves, every 10"] == [[None] * 6] * 2
    assert "| learning rate x 30 | +0 to +1 | no | +0 |" in program.tables(
        json.loads(json.dumps(summary))
    )


def test_figures_are_the_worst_of_all_quantizers(program):
    rows = [{"saturated": 0.25, "flushed": 0.0}, {"saturated": 0.5, "flushed": 0.0}]
    values = {"a/input/scale_lag": -3.0, "b/input/scale_lag": 1.0}
    values |= {"a/input/growth": math.nan, "b/input/growth": 2.0, "b/input/peak": 99.0}
    measured = jaxfp8.inspect.Measured(jnp.array(list(values.values())), tuple(values))
    assert program.reduced(measured, jnp.float32(7.0), rows) == [
        0.5,
        0.0,
        2.0,
        1.0,
        -3.0,
        7.0,
    ]
    nothing = program.reduced(
        jaxfp8.inspect.Measured(jnp.zeros(0), ()), jnp.float32(7.0), []
    )
    np.testing.assert_array_equal(nothing, [np.nan] * 5 + [7.0])


def test_breaks_do_what_they_say(program, tmp_path, capsys):
    options = [
        "--seeds",
        "1",
        "--clean",
        "2",
        "--steps",
        "8",
        "--json",
        str(tmp_path / "runs.json"),
    ]
    assert program.main(options) == 0
    table = capsys.readouterr().out
    assert (
        program.main([*options, "--report", "--picture", str(tmp_path / "runs.png")])
        == 0
    )
    assert capsys.readouterr().out == table
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "runs.json").read_text())
    rows = record["summary"]["breaks"]
    runs = record["runs"]
    assert list(rows) == list(program.BREAKS) and set(runs) == {"clean", *program.SHOWN}
    assert {"commit", "jax"} <= set(record["environment"])
    assert {len(found["figures"]) for found in runs.values()} == {4}

    def largest(name, figure):
        return rows[name]["largest"][program.FIGURES.index(figure)]

    # A factor of the tensor is one of its amax: of the kernel, and within a doubling of
    # the products behind it.
    assert 64 <= largest("weights", "growth") < 128
    assert largest("weights", "saturated") > 0.5
    for name, power in (("outlier_14", 14), ("outlier_20", 20)):
        assert abs(largest(name, "largest scale_lag") - power) < 1.5
    shown = {name: np.array(found["figures"]) for name, found in runs.items()}
    lag = program.FIGURES.index("smallest scale_lag")
    # The loss that is divided gives gradients that are: their amax falls by as much,
    # before any weight differs.
    assert abs(shown["gradients_40"][0, lag] + 40 - shown["clean"][0, lag]) < 4
    assert shown["gradients_40"][:, program.FIGURES.index("flushed")].min() > 0.99
    # A skipped step leaves its amax in the window, and nothing else.
    assert runs["outlier_20"]["loss"][0] is None
    assert shown["outlier_20"][1:, lag].max() < -15


def test_the_docs_have_the_tables(program):
    """All figures are beside the benchmark; the page has the range of clean runs and
    the picture.
    """
    path = ROOT / "benchmarks" / "results" / "broken_runs_cpu.json"
    summary = json.loads(path.read_text())["summary"]
    figures = (ROOT / "benchmarks" / "broken_runs.md").read_text()
    page = (ROOT / "docs" / "inspect.md").read_text()
    extremes, leads, _ = program.tables(summary).split("\n\n")
    assert extremes in figures and leads in figures
    clean_range = "\n".join(extremes.splitlines()[:3])
    assert "| clean, range |" in clean_range and clean_range in page
    assert (ROOT / "docs" / "images" / "broken_runs.png").exists()
    assert "images/broken_runs.png)" in page
