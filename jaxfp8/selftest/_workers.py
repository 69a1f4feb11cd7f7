"""Run checks in processes of their own: a check that crashes, hangs or breaks a GPU's
context fails alone.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import _checks

# The command that starts a worker.
COMMAND = [sys.executable, "-m", "jaxfp8.selftest"]
_START = 60  # seconds until a process has imported everything


def work(names: list[str], limit: int, quick: bool) -> None:
    """Run checks in this process and print a row of JSON for each.

    A check named "values:amax" is `_checks.values("amax")`. A check that takes longer
    than `limit` seconds ends the process, by SIGALRM, wherever it hangs. A check that
    raises ends the process too, after its row: a failed launch on a GPU would fail
    every later check in the process.
    """
    for name in names:
        start = time.perf_counter()
        signal.alarm(limit)
        row, raised = _run(name, quick)
        signal.alarm(0)
        print(
            json.dumps({"check": name, **row, "seconds": time.perf_counter() - start}),
            flush=True,
        )
        if raised:
            break


def _run(name, quick):
    kind, _, op = name.partition(":")
    options = {"quick": quick} if kind == "values" else {}
    try:
        return getattr(_checks, kind)(*[op] * bool(op), **options), False
    except Exception as error:  # a broken kernel or installation may raise anything
        return {
            "status": "failed",
            "detail": f"{type(error).__name__}: {error}"[:2000],
        }, True


def finish(jobs: list[list[str]], limit: int, quick: bool) -> list[dict[str, Any]]:
    """Return a row for every check of `jobs`; the checks of one job run in one process
    for as long as it lives.
    """
    options = ["--timeout", str(limit), *["--quick"] * quick]
    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        rows = pool.map(lambda names: _finish(names, limit, options), jobs)
        return list(itertools.chain.from_iterable(rows))


def _finish(names, limit, options):
    rows = []
    while len(rows) < len(names):
        # A process that died leaves checks undone: blame the first of them, and start
        # another for the rest.
        new, died = _start(names[len(rows) :], limit, options)
        rows += new
        failed = {"status": "failed", "detail": died or "no result"}
        if died and len(rows) == len(names):
            rows[-1] |= failed | {"detail": f"at exit: {died}"}
        elif died or not new:
            rows.append({"check": names[len(rows)], **failed})
    return rows


def _start(names, limit, options):
    """Return the rows of one process, and why the process died; "" or 0 for a process
    that ended well.
    """
    device, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    environment = os.environ | {
        # many processes share a GPU, and each needs one
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "CUDA_VISIBLE_DEVICES": device,
        # XLA dumps no thunks of a program from the cache
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    try:
        done = subprocess.run(
            [*COMMAND, *options, "--worker", *names],
            env=environment,
            capture_output=True,
            timeout=limit * len(names) + _START,
        )
        code = done.returncode
    except subprocess.TimeoutExpired as stopped:  # not even SIGALRM has ended it
        done = stopped
        code = -signal.SIGALRM
    lines, last = (
        (text or b"").decode(errors="replace").strip().splitlines()
        for text in (done.stdout, done.stderr)
    )
    # Libraries print too: only lines that begin like a row are rows.
    rows = [json.loads(line) for line in lines if line.startswith('{"check"')]
    if code == -signal.SIGALRM:
        return rows, f"no answer within {limit} s"
    if code < 0:
        return rows, f"crashed ({signal.Signals(-code).name})"
    message = last[-1][:500] if last else ""
    return rows, code and f"exit code {code}: {message}"
