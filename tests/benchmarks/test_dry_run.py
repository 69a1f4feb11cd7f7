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

from jaxfp8 import ops

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
    assert "quantize_norm rms, 128x256" in output and "% of a copy" in output
    assert len(record["cases"]["adamw"]["rows"]) == 2
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


def test_a_wrong_answer_has_no_time(options, monkeypatch):
    from _gpu_ops import gemm

    right = ops.scaled_matmul

    def wrong(a, b, *scales, precise):
        return right(a, b, *scales, precise=precise) * (1.0 if precise else 1.1)

    monkeypatch.setattr(ops, "scaled_matmul", wrong)
    rows, errors = gemm(options)
    assert {"jaxfp8 precise", "bf16"} == set(rows)
    assert "a row is off by" in errors["jaxfp8 fast"]


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


@pytest.mark.parametrize(
    "losses, factor, why",
    [
        ([5.0, 5.0, 4.0], 1.0, None),
        ([5.0, 5.2, 4.0], 1.0, "losses"),
        ([5.0, float("nan"), 4.0], 1.0, "losses"),
        ([5.0, 5.0, 4.0], 0.0, "moment"),
        ([5.0, 5.0, 4.0], float("nan"), "moment"),
    ],
)
def test_a_model_that_trains_otherwise_is_wrong(options, losses, factor, why):
    import _gpu_training

    def arm(losses, moment):
        return _gpu_training.Arm(None, None, {}, losses=losses, moment=moment)

    moment = jnp.arange(6.0).reshape(2, 3)
    reference = arm([5.0, 5.0, 4.0], moment)
    arguments = "flax", arm(losses, factor * moment), reference, 0.75
    if why is None:
        _gpu_training.check(*arguments)
    else:
        with pytest.raises(AssertionError, match=f"flax: {why}"):
            _gpu_training.check(*arguments)


def test_an_arm_that_fails_leaves_the_rows_of_the_others(options, monkeypatch):
    """Rows are there after each turn; an arm that fails has an error."""
    import _gpu_training

    class Arm(_gpu_training.Arm):
        def turn(self, batches):
            if self.facts["fails"]:
                raise RuntimeError("out of memory")
            self.seconds.append(0.5)
            self.host.append(0.1)
            self.losses = [5.0]
            self.moment = jnp.ones(3)

    made = iter([False, True, False, False])
    monkeypatch.setattr(
        _gpu_training,
        "compile_arm",
        lambda make, batch, compiler: Arm(make, None, {"fails": next(made)}),
    )
    turns = _gpu_training.model(options)
    counts = [(len(rows), len(errors)) for rows, errors in turns]
    assert counts == [(1, 0), (1, 1), (2, 1), (3, 1)]


def test_a_case_that_is_cut_off_keeps_what_it_yielded(options, tmp_path):
    from _gpu_cases import Case
    from _gpu_process import run_case

    path = tmp_path / "case.json"

    def run(options):
        yield {"bf16": {"us": 1}}, {}
        assert json.loads(path.read_text())["rows"] == {"bf16": {"us": 1}}
        raise RuntimeError("lost")

    result = run_case("model", Case(run), options, [], path)
    assert result["rows"] == {"bf16": {"us": 1}} and "lost" in result["errors"]["model"]


def test_peers_compiled_in_two_ways(options, monkeypatch):
    """On a GPU peers have a second name, for XLA without Triton."""
    import _gpu_layers
    from _gpu_inputs import Options

    again = {"": None, ", no triton": None}
    monkeypatch.setattr(
        Options,
        "compilers",
        lambda self, name: {"": None} if name.startswith("jaxfp8") else again,
    )
    rows, errors = _gpu_layers.small_dense(options)
    peers = {name + suffix for name in ("flax", "bf16") for suffix in again}
    assert not errors and set(rows) == peers | {"jaxfp8 own", "jaxfp8 drop-in"}


def test_kernels_of_a_trace(options, monkeypatch, capsys):
    """Two calls of two kernels: how often, how long, and the gap between; a CPU's trace
    has no kernels of a GPU.
    """
    import gpu_trace

    assert gpu_trace.events_of(2, jnp.add, jnp.ones(3), jnp.ones(3)) == {}
    events = [
        (0, 2000, "quantize"),
        (3000, 5000, "gemm"),
        (10000, 2000, "quantize"),
        (13000, 5000, "gemm"),
    ]
    monkeypatch.setattr(
        gpu_trace, "events_of", lambda *arguments: {"Stream #1": events}
    )
    gpu_trace.show("dense", 2, None)
    printed = capsys.readouterr().out
    assert "2.0 launches a call, span 9.0 us, busy 7.0 us" in printed
    assert "1.0 x     5.00 us  gemm" in printed
    assert printed.endswith("seq: quantize 2.0 (+2.0) | gemm 5.0 (+1.0)\n")
