"""Processes that crash, hang or end without a word: a row each, and the checks after
them run.
"""

import json
import signal
import subprocess
import sys

import pytest

from jaxfp8.selftest import _checks, _workers

pytestmark = pytest.mark.slow

# A worker that does what the names of its checks say.
FAKE = """
import json, os, signal, sys, time
names = sys.argv[sys.argv.index("--worker") + 1 :]
for name in names:
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        os.kill(os.getpid(), signal.SIGALRM)
    if name == "hang for ever":
        time.sleep(600)
    if name == "exit":
        print("noise"); print("the reason", file=sys.stderr); sys.exit(3)
    if name == "silence":
        sys.exit(0)
    print(json.dumps({"check": name,
        "status": "failed" if name == "raise" else "passed", "detail": ""}), flush=True)
    if name == "raise":
        sys.exit(0)
    if name == "crash at exit":
        os.abort()
"""


@pytest.fixture
def finish(monkeypatch, tmp_path):
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.setattr(
        _workers, "COMMAND", [sys.executable, str(tmp_path / "fake.py")]
    )
    monkeypatch.setattr(_workers, "_START", 1)

    def run(*jobs, limit=100):
        return [
            (row["check"], row["status"], row["detail"])
            for row in _workers.finish(jobs, limit, False)
        ]

    return run


@pytest.mark.parametrize(
    "name, detail",
    [
        ("crash", "crashed (SIGSEGV)"),
        ("hang", "no answer within 100 s"),
        ("exit", "exit code 3: the reason"),
        ("silence", "no result"),
        ("raise", ""),
    ],
)
def test_the_others_go_on(name, detail, finish):
    assert finish(["first", name, "last", name], ["beside"]) == [
        ("first", "passed", ""),
        (name, "failed", detail),
        ("last", "passed", ""),
        (name, "failed", detail),
        ("beside", "passed", ""),
    ]


def test_a_process_that_no_signal_reaches(finish):
    """The limit is that of each check; then the process is killed."""
    assert finish(["first", "hang for ever"], limit=1) == [
        ("first", "passed", ""),
        ("hang for ever", "failed", "no answer within 1 s"),
    ]


def test_a_check_that_raises_ends_its_process(monkeypatch, capsys):
    """What a failed launch leaves behind on a GPU would fail the next check."""

    def broken(op, quick):
        raise RuntimeError(f"CUDA_ERROR_ILLEGAL_ADDRESS in {op}")

    monkeypatch.setattr(_checks, "values", broken)
    _workers.work(["library", "values:amax", "library"], 100, False)
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["check"] == "library"
    assert (second["check"], second["status"]) == ("values:amax", "failed")
    assert second["detail"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS in amax"
    assert signal.alarm(0) == 0


def test_a_check_that_hangs_ends_its_process():
    """Wherever it hangs, also where Python's own handlers would never run."""
    program = (
        "import ctypes; from jaxfp8.selftest import _checks, _workers\n"
        "_checks.library = lambda: ctypes.PyDLL(None).sleep(60)\n"
        "_workers.work(['library'], 1, False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
    )
    assert done.returncode == -signal.SIGALRM and not done.stdout
