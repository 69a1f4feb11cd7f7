"""Run each check in a process of its own: one that crashes, hangs or breaks a GPU's
context fails alone.
"""

import contextlib
import multiprocessing
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from . import _checks

_LIMIT = 210  # seconds that a process may take, with its imports
# A new Python for each process: a copy of this one would share its threads and devices.
_spawned = multiprocessing.get_context("spawn")


def begin(name: str, connection) -> None:
    """Run a check in a process that has just begun, "machine", "training" or that of an
    op by its name, and send its row to `connection`.
    """
    # Many processes share a GPU, and each needs one. XLA dumps no thunks of a program
    # from the cache.
    device, *_ = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = device
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        if name in ("machine", "training"):
            row = getattr(_checks, name)()
        else:
            row = _checks.values(name)
    except Exception as error:  # a broken kernel or installation may raise anything
        detail = f"{type(error).__name__}: {error}"[:2000]
        row = {"status": "failed", "detail": detail}
    connection.send({"check": name} | row)


def finish(names: list[str], side_by_side: int) -> list[dict[str, Any]]:
    """Return the row of every check; so many processes run side by side."""
    with ThreadPoolExecutor(side_by_side) as pool:
        return list(pool.map(_row, names))


def _row(name):
    receiver, sender = _spawned.Pipe(duplex=False)
    process = _spawned.Process(target=begin, args=(name, sender), daemon=True)
    process.start()
    sender.close()
    process.join(_LIMIT)
    died = _why_it_died(process)
    if not died:
        with contextlib.suppress(EOFError):
            return receiver.recv()
    return {"check": name, "status": "failed", "detail": died or "no result"}


def _why_it_died(process) -> str:
    code = process.exitcode
    if code is None:
        process.kill()
        return f"no answer within {_LIMIT} s"
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    return f"exit code {code}" if code else ""
