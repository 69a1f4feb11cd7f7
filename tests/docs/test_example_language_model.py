"""examples/language_model.py: its table, picture and proof, and what makes its
comparison fair.
"""

import importlib
import json
import math

import chex
import jax
import numpy as np
import pytest
from programs.cases import MATMUL

from . import running


@pytest.fixture
def language_model(monkeypatch):
    with running.imported(monkeypatch, "language_model") as module:
        yield module


def test_language_model_prints_a_table_and_writes_picture_and_json(tmp_path):
    run = running.run(
        tmp_path,
        "language_model",
        "--tiny",
        "--control",
        "--seeds",
        "2",
        "--json",
        "out.json",
    )
    # the progress bar, with losses
    assert "8/8" in run.stderr and "jaxfp8=" in run.stderr

    lines = run.stdout.splitlines()
    table = running.rows(lines)
    assert lines[0].split()[:3] == ["arm", "validation", "loss"]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(results) == {"bf16", "jaxfp8", "flax", "control"}
    for arm, result in results.items():
        mean, difference, ms, *seeds = table[arm]
        assert math.isclose(
            float(mean), np.mean([float(loss) for loss in seeds]), abs_tol=1e-4
        )
        # log(103 characters) is 4.6
        assert len(seeds) == 2 and all(0 < float(loss) < 5 for loss in seeds)
        assert (difference == "-") == (arm == "bf16")
        assert float(ms) == pytest.approx(result["median_ms_per_step"], abs=0.06)
        assert float(ms) > 0
    # four steps prove nothing
    assert "PASS" not in run.stdout and "FAIL" not in run.stdout

    picture = (tmp_path / "language_model.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000


def test_arms_start_from_the_same_weights_and_batches(language_model):
    arms = language_model.ARMS | language_model.CONTROL
    optimizer = language_model.make_optimizer(10)
    states = {
        name: language_model.create_state(
            language_model.LanguageModel(50, cls), 3, optimizer
        )
        for name, cls in arms.items()
    }
    for name, state in states.items():
        chex.assert_trees_all_equal(
            state.params["params"], states["bf16"].params["params"]
        )
        # The optimizer, its clipping and its weight decay see the parameters and
        # nothing else.
        assert len(jax.tree.leaves(state.opt_state)) == len(
            jax.tree.leaves(states["bf16"].opt_state)
        ), name

    first, again = (
        list(language_model.Corpus().random_batches(3, 4, 2, 8)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)
    other = list(language_model.Corpus().random_batches(4, 4, 2, 8))
    assert not np.array_equal(first, other)


def test_control_is_fp8_with_scale_one(language_model):
    """Values that e4m3 holds pass unchanged, larger ones saturate at 448: nothing was
    scaled.
    """
    x = np.array([[0.5, 1000.0]], np.float32)
    kernel = np.eye(2, dtype=np.float32)
    module = language_model.UnscaledFp8DotGeneral()
    y = module.apply({}, x, kernel, MATMUL)
    np.testing.assert_array_equal(y, [[0.5, 448.0]])


PROOF = {"jaxfp8": 0.01, "flax": 0.008, "control": 1.4}


@pytest.mark.parametrize(
    "differences, passes",
    [
        ({}, True),
        ({"jaxfp8": -0.01}, True),
        ({"jaxfp8": 0.021, "flax": 0.03}, False),
        ({"jaxfp8": 0.014}, False),  # 0.006 worse than Flax
        ({"control": 0.1}, False),
        ({"jaxfp8": math.nan}, False),
        ({"control": math.nan}, False),
    ],
)
def test_verdict_of_the_full_proof(monkeypatch, differences, passes):
    monkeypatch.syspath_prepend(running.EXAMPLES)
    differences = {"bf16": 0.0} | PROOF | differences
    results = {arm: {"mean_minus_bf16": loss} for arm, loss in differences.items()}
    passed, verdict = importlib.import_module("_report").judge(results)
    assert passed == passes
    assert verdict.startswith("PASS: " if passes else "FAIL: ")
