"""Processes that crash, hang or end without a word: a row each, and the checks after
them run.
"""

import pytest

from jaxfp8.selftest import _checks, _workers

from . import fake

pytestmark = pytest.mark.slow


def finish(monkeypatch, *jobs, limit=100):
    monkeypatch.setattr(_workers, "begin", fake.begin)
    monkeypatch.setattr(_workers, "_START", 30)
    monkeypatch.setattr(_workers, "_LIMIT", limit)
    return [
        (row["check"], row["status"], row["detail"]) for row in _workers.finish(jobs)
    ]


@pytest.mark.parametrize(
    "name, detail",
    [
        ("crash", "crashed (SIGSEGV)"),
        ("exit", "exit code 3"),
        ("silence", "no result"),
        ("raise", ""),
    ],
)
def test_the_others_go_on(name, detail, monkeypatch):
    assert finish(monkeypatch, ["first", name, "last", name], ["beside"]) == [
        ("first", "passed", ""),
        (name, "failed", detail),
        ("last", "passed", ""),
        (name, "failed", detail),
        ("beside", "passed", ""),
    ]


def test_a_check_that_hangs_ends_its_process(monkeypatch):
    """Wherever it hangs; the limit is that of each check."""
    assert finish(monkeypatch, ["first", "hang"], limit=1) == [
        ("first", "passed", ""),
        ("hang", "failed", "no answer within 1 s"),
    ]


@pytest.mark.parametrize(
    "name, detail",
    [
        ("crash at exit", "crashed (SIGABRT)"),
        ("hang at exit", "no answer within 1 s"),
    ],
)
def test_a_process_that_dies_after_its_checks(name, detail, monkeypatch):
    assert finish(monkeypatch, [name], limit=1) == [(name, "failed", detail)]


def test_a_check_that_raises_ends_its_process(monkeypatch):
    """What a failed launch leaves behind on a GPU would fail the next check."""

    def broken(op):
        raise RuntimeError(f"CUDA_ERROR_ILLEGAL_ADDRESS in {op}")

    monkeypatch.setattr(_checks, "machine", lambda: {"status": "passed"})
    monkeypatch.setattr(_checks, "values", broken)
    rows = []
    _workers.work(["machine", "amax", "machine"], rows.append)
    first, second = rows
    assert first["check"] == "machine"
    assert (second["check"], second["status"]) == ("amax", "failed")
    assert second["detail"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS in amax"
