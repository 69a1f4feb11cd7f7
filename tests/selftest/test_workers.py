"""Processes that crash, hang or end without a word: a row each, and the checks beside
them run.
"""

import pytest

from jaxfp8.selftest import _workers

from . import fake

pytestmark = pytest.mark.slow


def finish(monkeypatch, names, limit=130):
    monkeypatch.setattr(_workers, "begin", fake.begin)
    monkeypatch.setattr(_workers, "_LIMIT", limit)
    return {
        row["check"]: (row["status"], row["detail"])
        for row in _workers.finish(names, len(names))
    }


def test_the_others_go_on(monkeypatch):
    failed = {
        "crash": "crashed (SIGSEGV)",
        "exit": "exit code 3",
        "silence": "no result",
        "crash at exit": "crashed (SIGABRT)",
    }
    rows = finish(monkeypatch, ["first", *failed, "last"])
    assert rows == {
        "first": ("passed", ""),
        **{name: ("failed", detail) for name, detail in failed.items()},
        "last": ("passed", ""),
    }


def test_checks_that_hang(monkeypatch):
    """Wherever they hang."""
    names = ["hang", "hang at exit"]
    rows = finish(monkeypatch, names, limit=20)
    assert rows == dict.fromkeys(names, ("failed", "no answer within 20 s"))


def test_a_check_that_raises():
    (row,) = _workers.finish(["no such op"], 1)
    assert (row["check"], row["status"]) == ("no such op", "failed")
    assert row["detail"] == "KeyError: 'no such op'"
