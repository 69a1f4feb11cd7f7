"""The GPU benchmark's cases at small sizes on a CPU, and its JSON; the CPU goals'
program likewise.
"""

import json
from pathlib import Path

import another_process
import flax.linen as nn
import jax.numpy as jnp
import pytest
from promotion import as_users_have_jax

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(program, *options, code=0):
    return another_process.python(
        BENCHMARKS / program, *options, code=code, XLA_FLAGS=None
    ).stdout


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "gpu.json"
    output = run(
        "gpu.py", "--tiny", "--platform", "cpu", "--budget", 840, "--json", path
    )
    return output, json.loads(path.read_text()), path


def test_every_case_runs(dry_run):
    output, record, _ = dry_run
    assert record["environment"]["dry_run"] and record["environment"]["device"] == "cpu"
    allowed = {"torch", "jaxfp8 own, fused"}  # what may be missing
    for name, case in record["cases"].items():
        assert case["rows"] and set(case["errors"]) <= allowed, (name, case["errors"])
        assert all(row["us"] > 0 for row in case["rows"].values())
    kernels = record["cases"]["kernels"]["rows"]
    assert len({row["kernel"] for row in kernels.values()}) >= 31 and len(kernels) >= 62
    assert all(
        {"gb_s", "of_copy"} <= set(row) or "tflops" in row or "us_a_launch" in row
        for row in kernels.values()
    )
    for name in ("model", "losses", "scan"):
        rows = record["cases"][name]["rows"]
        assert {"jaxfp8 own", "jaxfp8 quantize", "flax", "bf16"} <= set(rows)
        for row in rows.values():
            assert row["tokens_a_second"] > 0 and row["host_ms"] > 0
            assert row["memory_mib"] > 1 and len(row["losses"]) == row["steps"] + 2
    assert "flax, no zeros" in record["cases"]["scan"]["rows"]
    layers = ("dense", "small_dense", "gated_mlp")
    for name in layers:
        rows = record["cases"][name]["rows"]
        assert {"jaxfp8 own", "jaxfp8 drop-in", "flax", "bf16"} <= set(rows)
        assert all(sum(row["gemms"].values()) >= 3 for row in rows.values()), name


@pytest.mark.parametrize("case", ["dense512", "language_model"])
def test_cpu_goals(case, tmp_path):
    path = tmp_path / "cpu.json"
    output = run(
        "train_step.py", "--tiny", "--turns", 2, "--only", case, "--json", path
    )
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == [case]
    assert all(
        set(row["goals"]) <= set(row["times_faster_than"]) and row["case"] in output
        for row in rows
    )


@pytest.fixture
def options():
    """Options of a dry run; JAX as a program has it."""
    with as_users_have_jax():
        from _gpu_inputs import Options

        yield Options(tiny=True, turns=1)


def test_a_wrong_peer_does_not_end_the_case(options, monkeypatch):
    import _gpu_layers

    dense = _gpu_layers.models.dense
    ones = nn.Dense(
        64, use_bias=False, dtype=jnp.bfloat16, kernel_init=nn.initializers.ones
    )

    def wrong(name, features):
        return ones if name == "flax" else dense(name, features)

    monkeypatch.setattr(_gpu_layers.models, "dense", wrong)
    rows, errors = _gpu_layers.dense(options)
    assert "flax" not in rows
    assert "gradient of x: off by" in errors["flax"]
    assert "jaxfp8 own" in rows
