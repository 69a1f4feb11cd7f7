"""Results of GPUs in the docs: the tables that are there, those of a made-up session, and what is no result."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import tables  # noqa: E402

ENVIRONMENT = {
    "command": "python benchmarks/gpu.py",
    "device": "NVIDIA H200",
    "driver": "NVIDIA H200, 580.159.04, 1980 MHz",
    "jax": "0.11.2",
    "python": "3.12.3",
    "commit": "abc1234",
    "dry_run": False,
}
QUANTIZE = {"kernel": "quantize bf16", "us": 26.1, "gb_s": 3859.4, "of_copy": 89.6, "custom_calls": 1.0}
GEMM = {"kernel": "scaled_matmul fast", "us": 201.0, "tflops": 1368.2, "custom_calls": 0.0}
SCALES = {"kernel": "amax_to_scale", "us": 210.0, "us_a_launch": 2.1, "custom_calls": 100.0}


@pytest.mark.parametrize("name, page", tables.PAGES.items())
def test_the_docs_have_what_was_measured(name, page):
    text = page.read_text()
    assert tables.replaced(text, name, tables.section(name)) == text, "python benchmarks/tables.py"


def folder(path, rows, errors=(), selftest=None, **environment):
    """What a call wrote."""
    path.mkdir(parents=True, exist_ok=True)
    cases = {"kernels": {"rows": rows, "errors": dict(errors)}}
    record = {"environment": ENVIRONMENT | environment, "cases": cases, "goals": []}
    (path / "kernels.json").write_text(json.dumps(record))
    if selftest:
        (path / "selftest.json").write_text(json.dumps(selftest))
    return path


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_a_session_becomes_a_table(tmp_path, results):
    assert tables.section("kernels", results) == "Not measured yet."
    rows = {"quantize bf16, 8192x4096": QUANTIZE, "scaled_matmul fast, 8192x8192": GEMM, "amax_to_scale, 4096": SCALES}
    out = folder(tmp_path / "out", rows, {"quantize_norm rms": "JaxRuntimeError: illegal\naddress"}, {"ops": []})
    assert tables.keep(out, results) == [results / "h200_kernels.json", results / "h200_selftest.json"]
    assert json.loads((results / "h200_selftest.json").read_text())["session"]["commit"] == "abc1234"
    assert (
        tables.section("kernels", results)
        == """\
NVIDIA H200, driver 580.159.04, JAX 0.11.2, Python 3.12.3, commit abc1234: `benchmarks/results/h200_kernels.json`.

| kernel | shape | us | rate | of a copy | goal |
| --- | --- | --- | --- | --- | --- |
| quantize bf16 | 8192x4096 | 26.1 | 3859 GB/s | 90 % | 88 % |
| scaled_matmul fast | 8192x8192 | 201.0 | 1368 TFLOP/s, the reference |  | 1300 TFLOP/s |
| amax_to_scale | 4096 | 2.10 |  |  |  |
| quantize_norm rms |  | failed | JaxRuntimeError: illegal address |  |  |"""
    )


def test_calls_of_one_commit_are_joined(tmp_path, results):
    """A later call measures what failed; another commit starts anew."""
    failed = {"scaled_matmul fast": "took more than 30 s", "amax f32": "exit status -11"}
    tables.keep(folder(tmp_path / "1", {"quantize bf16, 8192x4096": QUANTIZE}, failed), results)
    tables.keep(folder(tmp_path / "2", {"scaled_matmul fast, 8192x4096": GEMM}, command="other"), results)
    case = json.loads((results / "h200_kernels.json").read_text())["cases"]["kernels"]
    assert list(case["rows"]) == ["quantize bf16, 8192x4096", "scaled_matmul fast, 8192x4096"]
    assert case["errors"] == {"amax f32": "exit status -11"}
    goals = json.loads((results / "h200_kernels.json").read_text())["goals"]
    assert next(goal["value"] for goal in goals if goal["what"] == "kernel of GEMM fast") == GEMM["tflops"]
    tables.keep(folder(tmp_path / "3", {"amax_to_scale, 4096": SCALES}, commit="def5678"), results)
    case = json.loads((results / "h200_kernels.json").read_text())["cases"]["kernels"]
    assert list(case["rows"]) == ["amax_to_scale, 4096"] and not case["errors"]


@pytest.mark.parametrize("environment", [{"dry_run": True}, {"commit": ""}])
def test_no_result(tmp_path, results, environment):
    with pytest.raises(tables.NoResult, match="a dry run, or without a commit"):
        tables.keep(folder(tmp_path / "out", {"quantize bf16, 8192x4096": QUANTIZE}, **environment), results)
    with pytest.raises(tables.NoResult, match="no kernels.json or gpu.json"):
        tables.keep(tmp_path, results)
    assert not list(results.iterdir())


def test_goals(tmp_path, results):
    goal = {"what": "GEMM fast", "case": "gemm", "unit": "TFLOP/s", "goal": 1300, "stretch": 1400, "value": 1388.2}
    other = {"what": "Dense", "case": "dense", "unit": "x", "goal": 1.5, "stretch": 1.65, "value": None}
    record = {"environment": ENVIRONMENT, "cases": {"gemm": {}, "dense": {}}}
    missing = other | {"met": "not measured: dense: bf16"}
    record["goals"] = [goal | {"met": "met"}, missing, missing | {"case": "not of this run"}]
    assert (
        tables.goals_table(record)
        == """\
| case | value | goal | stretch |  |  |
| --- | --- | --- | --- | --- | --- |
| GEMM fast | 1388 | 1300 | 1400 | TFLOP/s | met |
| Dense |  | 1.50 | 1.65 | x | not measured: dense: bf16 |"""
    )
