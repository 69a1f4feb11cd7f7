"""Run checks in processes of their own: a check that crashes, hangs or breaks a GPU's
context fails alone.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from . import _checks

_LIMIT = 150  # seconds that a check may take
_START = 60  # seconds until a process has imported everything
# A new Python for each process: a copy of this one would share its threads and devices.
_spawned = multiprocessing.get_context("spawn")


def work(names: list[str], send: Callable[[dict], None]) -> None:
    """Run checks in this process, "machine", "training" or that of an op by its name,
    and send a row for each.

    A check that fails is the last one in the process: a failed launch on a GPU would
    fail every later check.
    """
    for name in names:
        start = time.perf_counter()
        try:
            if name in ("machine", "training"):
                row = getattr(_checks, name)()
            else:
                row = _checks.values(name)
        except Exception as error:  # a broken kernel or installation may raise anything
            detail = f"{type(error).__name__}: {error}"[:2000]
            row = {"status": "failed", "detail": detail}
        send({"check": name, **row, "seconds": time.perf_counter() - start})
        if row["status"] == "failed":
            return


def begin(names: list[str], connection) -> None:
    """Work in a process that has just begun, and send the rows to `connection`."""
    # Many processes share a GPU, and each needs one. XLA dumps no thunks of a program
    # from the cache.
    device, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_enable_compilation_cache", False)
    work(names, connection.send)


def finish(jobs: list[list[str]]) -> list[dict[str, Any]]:
    """Return a row for every check of `jobs`; the checks of one job run in one process
    for as long as it lives.
    """

    def rows_of(names):
        rows = []
        # A process that ended early leaves checks undone: another one runs the rest.
        while len(rows) < len(names):
            rows += _rows_of_process(names[len(rows) :])
        return rows

    with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
        return sum(pool.map(rows_of, jobs), [])


def _rows_of_process(names):
    """Return the rows of one process; the check at which the process died is failed."""
    receiver, sender = _spawned.Pipe(duplex=False)
    process = _spawned.Process(target=begin, args=(names, sender), daemon=True)
    process.start()
    sender.close()
    rows = []
    try:
        while receiver.poll(_LIMIT if rows else _LIMIT + _START):
            rows.append(receiver.recv())
    except (EOFError, OSError):  # the process has ended, or is about to
        process.join(_LIMIT)
    died = _why_it_died(process)
    if died or not rows:
        del rows[len(names) - 1 :]  # a process that died at its exit
        row = {"check": names[len(rows)], "status": "failed"}
        rows.append(row | {"detail": died or "no result"})
    return rows


def _why_it_died(process) -> str:
    code = process.exitcode
    if code is None:
        process.kill()
        return f"no answer within {_LIMIT} s"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    return f"exit code {code}" if code else ""
