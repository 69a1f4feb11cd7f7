"""The command as a user runs it: exit code, table, JSON, options, and the remedy for an
op that failed.
"""

import json
import re

import another_process
import pytest

from jaxfp8.inspect import _machine, _op_calls
from jaxfp8.ops import _ffi
from jaxfp8.selftest import __main__ as command, _checks, _workers

NATIVE = pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="no CPU library")


def run(*arguments, **environment):
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": another_process.PATH}
    return another_process.python("-m", "jaxfp8.selftest", *arguments, **environment)


@pytest.mark.slow
@NATIVE
def test_one_op(tmp_path):
    """It is disabled, which is no failure and is said."""
    path = tmp_path / "selftest.json"
    arguments = "--only", "amax", "--json", str(path)
    printed = run(*arguments, JAXFP8_DISABLE="amax").stdout
    found = json.loads(path.read_text())
    rows = {row["check"]: row for row in found["rows"]}
    assert set(rows) == {"machine", "training", "amax"}
    assert found["passed"] and {row["status"] for row in found["rows"]} == {"passed"}
    assert found["environment"]["versions"] == json.loads(
        json.dumps(_machine.versions())
    )
    assert found["environment"]["settings"]["JAXFP8_DISABLE"] == "amax"
    detail = "7 cases, 0 by the custom call; JAXFP8_DISABLE names amax"
    assert rows["amax"]["detail"] == detail
    assert found["seconds"] > 0
    assert f"passed  amax      {detail}\n" in printed
    assert printed.splitlines()[-1].startswith("passed in")


@NATIVE
@pytest.mark.slow
def test_every_op(tmp_path):
    path = tmp_path / "selftest.json"
    run("--json", str(path))
    rows = {row["check"]: row for row in json.loads(path.read_text())["rows"]}
    on_cpu = next(
        library.ops for library in _ffi.LIBRARIES if library.platform == "cpu"
    )
    assert {op for op in _op_calls.OPS if rows[op]["custom_calls"]} == set(
        on_cpu
    ) & set(_op_calls.OPS)


@pytest.fixture
def rows(monkeypatch):
    """What the workers find, on a GPU."""
    found = {}

    def finish(jobs, *_):
        names = [name for job in jobs for name in job]
        return [
            {"check": name, "status": "passed", "detail": ""} | found.get(name, {})
            for name in names
        ]

    found["machine"] = {"environment": {"platform": "cuda"}}
    monkeypatch.setattr(_workers, "finish", finish)
    return found


def test_a_failed_op(rows, monkeypatch, capsys, tmp_path):
    """The table, the remedy beside what is disabled already, the exit code and the file
    say so.
    """
    monkeypatch.setenv("JAXFP8_DISABLE", "write_histories,amax")
    rows["training"] = {"status": "failed", "detail": "a state"}
    rows["quantize_norm"] = {"status": "failed", "detail": "crashed (SIGSEGV)"}
    rows["amax"] = {"status": "failed", "detail": "a bit"}
    assert command.main(["--json", str(tmp_path / "found.json")]) == 1
    printed = capsys.readouterr().out
    *passed, training, amax, norm, remedy, _ = printed.splitlines()
    assert training.split() == "failed training a state".split()
    assert amax.split() == "failed amax a bit".split()
    assert norm.split() == "failed quantize_norm crashed (SIGSEGV)".split()
    assert not any("failed" in line for line in passed)
    switch = "set JAXFP8_DISABLE=amax,quantize_norm,write_histories"
    assert remedy == f"until it is repaired, {switch}"
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["passed"] and found["environment"] == {"platform": "cuda"}


def test_a_backend_that_does_not_start(rows, monkeypatch, capsys):
    """Parts of what `python -m jaxfp8` says are errors; the rest of it counts."""
    monkeypatch.setattr(_machine, "devices", lambda: 1 / 0)
    rows["machine"] = row = _checks.machine()
    assert row["status"] == "failed"
    rows["amax"] = {"status": "failed", "detail": "RuntimeError: no CUDA"}
    assert command.main([]) == 1
    printed = capsys.readouterr().out
    assert re.search("failed +machine +ZeroDivisionError: division by zero\n", printed)
    assert "JAXFP8_DISABLE" not in printed  # it would not help


@NATIVE
def test_a_library_that_does_not_load(monkeypatch):
    monkeypatch.setattr(_op_calls, "OPS", {})
    assert _checks.machine()["status"] == "passed"
    library = _ffi.LIBRARIES[0]._replace(error="does not load")
    monkeypatch.setattr(_ffi, "LIBRARIES", [library])
    row = _checks.machine()
    assert (row["status"], row["detail"]) == ("failed", "does not load")
    assert row["environment"]["libraries"][0]["error"] == "does not load"
