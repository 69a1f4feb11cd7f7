"""The selftest as a TPU runs it: its values on the CPU of this machine, its programs
compiled for a TPU.
"""

import json

import numpy as np
import pytest

from jaxfp8 import ops
from jaxfp8.inspect import _op_calls
from jaxfp8.ops import _support
from jaxfp8.selftest import __main__ as command, _cases, _checks

from . import compiler


@pytest.fixture
def on_tpu(monkeypatch):
    """An odd shape and one for blocks, as a TPU computes them."""
    monkeypatch.setattr(_cases, "_SHAPES", _cases._SHAPES[2:5:2])
    monkeypatch.setattr(_support, "backend", lambda: "tpu")
    with ops.implementation("tpu"):
        yield


@pytest.mark.parametrize("op", _op_calls.OPS)
def test_values(op, on_tpu):
    row = _checks.values(op)
    assert row["status"] == "passed", row["detail"]
    is_refused = "; refused: block_scaled_matmul: expected one" in row["detail"]
    assert is_refused == (op == "block_scaled_matmul")


def test_one_process_has_the_tpu():
    jobs = command.jobs(["amax", "quantize"], "tpu")
    assert jobs == [["training", "amax", "quantize"]]
    assert len(command.jobs(["amax", "quantize"], "cpu")) == 2


def test_numbers_that_a_tpu_reads_as_zero(monkeypatch):
    monkeypatch.setattr(_support, "backend", lambda: "tpu")
    x = np.float32([2.0**-149, -(2.0**-127), 2.0**-126, np.nan, 1])
    expected = np.float32([0, 0, 2.0**-126, np.nan, 1])
    half = np.float16([2.0**-24])
    got = _checks._numpy([x, half])
    np.testing.assert_array_equal(got[0].view(np.uint32), expected.view(np.uint32))
    assert got[1] is half


def test_programs_compile_for_a_tpu():
    if reason := compiler.missing():
        pytest.skip(reason)
    outcomes = json.loads(compiler.run("selftest_programs"))
    refused = {op: why for op, why in outcomes.items() if why != "compiled"}
    assert set(refused) == {"block_scaled_matmul"}
    assert "TPUs have no such FP8 product" in refused["block_scaled_matmul"]
