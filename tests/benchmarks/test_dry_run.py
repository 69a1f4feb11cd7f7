"""The GPU benchmark's cases at small sizes on a CPU, its JSON and its picture; the CPU goals' program likewise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxfp8 import ops

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(program, *options, code=0):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(BENCHMARKS / program), *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    output = run("gpu.py", "--tiny", "--platform", "cpu", "--json", path)
    return output, json.loads(path.read_text()), path


@pytest.mark.slow
def test_every_case_runs(dry_run):
    output, record, _ = dry_run
    assert record["environment"]["dry_run"] and record["environment"]["device"] == "cpu"
    allowed = {"torch", "jaxfp8 own, fused"}  # what may be missing
    for name, case in record["cases"].items():
        assert case["rows"] and set(case["errors"]) <= allowed, (name, case["errors"])
        assert all(row["us"] > 0 for row in case["rows"].values())
    kernels = record["cases"]["kernels"]["rows"]
    assert len({row["kernel"] for row in kernels.values()}) >= 31 and len(kernels) >= 62
    assert all({"gb_s", "of_copy"} <= set(row) or "tflops" in row or "us_a_launch" in row for row in kernels.values())
    assert "quantize_norm rms, 128x256" in output and "% of a copy" in output
    layers = ("dense", "small_dense", "gated_mlp", "transformer_layer")
    for name in layers:
        rows = record["cases"][name]["rows"]
        assert {"jaxfp8 own", "jaxfp8 drop-in", "flax", "bf16"} <= set(rows)
        assert all(sum(row["gemms"].values()) >= 3 for row in rows.values()), name


@pytest.mark.slow
def test_the_table_claims_nothing(dry_run):
    output, record, _ = dry_run
    table = output.split("dry run, no GPU times\n")[1]
    lines = table.splitlines()
    assert len(lines) == len(record["goals"]) >= 15
    assert all(line.endswith("dry run") or "not measured" in line for line in lines), table
    unmeasured = [goal["what"] for goal in record["goals"] if goal["value"] is None]
    assert all("torch" in what for what in unmeasured), unmeasured


@pytest.mark.slow
def test_picture(dry_run, tmp_path):
    run("plot.py", dry_run[2], "--out", tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_spent_budget(tmp_path):
    path = tmp_path / "gpu.json"
    output = run("gpu.py", "--tiny", "--platform", "cpu", "--budget", 0, "--json", path)
    cases = json.loads(path.read_text())["cases"]
    assert all("not started" in str(case["errors"]) for case in cases.values()) and "not measured" in output


@pytest.mark.slow
def test_a_case_in_its_own_process(tmp_path):
    """As on a GPU: a case that dies is noted, and the others run."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from _gpu_process import run_in_a_process;"
        "arguments = ['--turns', '2', '--platform', 'cpu', '--tiny'];"
        "result = run_in_a_process(sys.argv[3], sys.argv[2], sys.argv[4:], arguments, 300);"
        "print(sorted(result['rows']), list(result['errors']))"
    )

    def result(flags, *case):
        command = [sys.executable, "-c", code, str(BENCHMARKS), flags, *case]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout

    assert result("", "launches") == "['XLA fusion', 'jaxfp8 custom call'] []\n"
    assert result("--xla_no_such_flag=1", "launches") == "[] ['launches']\n"
    assert result("", "kernels", "amax bf16") == "['amax bf16, 128x256', 'amax bf16, 64x128'] []\n"
    assert result("", "kernels", "of no name", "amax bf16").endswith("64x128'] ['of no name']\n")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dense512", pytest.param("language_model", marks=pytest.mark.slow)])
def test_cpu_goals(case, tmp_path):
    path = tmp_path / "cpu.json"
    output = run("train_step.py", "--tiny", "--turns", 2, "--only", case, "--json", path)
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == [case]
    assert all(set(row["goals"]) <= set(row["times_faster_than"]) and row["case"] in output for row in rows)


@pytest.fixture
def options(monkeypatch):
    """Options of a dry run; JAX as a program has it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        from _gpu_inputs import Options

        yield Options(tiny=True, turns=1)


@pytest.mark.slow
def test_a_wrong_answer_has_no_time(options, monkeypatch):
    from _gpu_ops import gemm

    right = ops.scaled_matmul

    def wrong(a, b, *scales, precise):
        return right(a, b, *scales, precise=precise) * (1.0 if precise else 1.1)

    monkeypatch.setattr(ops, "scaled_matmul", wrong)
    rows, errors = gemm(options)
    assert {"jaxfp8 precise", "bf16"} == set(rows) and "a row is off by" in errors["jaxfp8 fast"]


@pytest.mark.slow
def test_a_wrong_peer_does_not_end_the_case(options, monkeypatch):
    import _gpu_layers

    dense = _gpu_layers.models.dense
    ones = nn.Dense(64, use_bias=False, dtype=jnp.bfloat16, kernel_init=nn.initializers.ones)

    def wrong(name, features):
        return ones if name == "flax" else dense(name, features)

    monkeypatch.setattr(_gpu_layers.models, "dense", wrong)
    rows, errors = _gpu_layers.dense(options)
    assert "flax" not in rows and "gradient of x: off by" in errors["flax"] and "jaxfp8 own" in rows


@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path):
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "gpu.py: JAX has no cuda device" in done.stderr
