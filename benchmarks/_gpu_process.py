"""A case of the GPU benchmark in a process of its own: a kernel that fails ends only
its case, or its part.

After each part the process writes its rows, its errors, and the parts that are done or
running. After a part that breaks the process, another process goes on with the rest.
"""

import faulthandler
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator

PART_SECONDS = 30  # a part that takes longer hangs
INTERRUPTED = "interrupted"


def run_case(
    name: str, case, options, parts: list[str], path: pathlib.Path | None = None
) -> dict:
    """Run one case in this process; return its rows, its errors, its seconds and its
    parts.

    Args:
        name: the name of the case.
        case: the `Case`.
        options: the `Options`.
        parts: the parts to run, for a case that has parts.
        path: the file to write after each part, or None. With a path the run ends once
            the device may be lost.
    """
    import jax

    start = time.monotonic()
    result = {"rows": {}, "errors": {}, "done": [], "running": None, "seconds": 0.0}

    def save():
        result["seconds"] = time.monotonic() - start
        if path:
            path.write_text(json.dumps(result))

    for part in parts or (name,):
        result["running"] = part
        save()
        if path and parts:
            faulthandler.dump_traceback_later(PART_SECONDS, exit=True)
        lost = False
        try:
            answer = case.run(options, *([part] if parts else []))
            for rows, errors in answer if isinstance(answer, Iterator) else [answer]:
                result["rows"] |= rows
                result["errors"] |= errors
                save()
        except Exception as error:  # the others go on
            traceback.print_exc()
            result["errors"][part] = f"{type(error).__name__}: {error}"[:1500]
            lost = isinstance(error, jax.errors.JaxRuntimeError)
        faulthandler.cancel_dump_traceback_later()
        result["done"].append(part)
        result["running"] = None
        save()
        if lost and path:
            break
    return result


def run_in_a_process(
    name: str, xla_flags: str, parts: list[str], arguments: list[str], seconds: float
) -> dict:
    """Run one case in processes with `xla_flags`, for at most `seconds`; `arguments`
    are further ones of gpu.py.
    """
    deadline = time.monotonic() + seconds
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {xla_flags}".strip()
    }
    joined = {"rows": {}, "errors": {}, "seconds": 0.0}
    left = list(parts)
    while True:
        record, failure = _run_once(
            name,
            [*arguments, *(["--parts", *left] if left else [])],
            environment,
            deadline,
        )
        joined["rows"] |= record.get("rows", {})
        joined["errors"] |= record.get("errors", {})
        joined["seconds"] += record.get("seconds", 0.0)
        running = record.get("running")
        if failure:
            joined["errors"][running or name] = failure
        if failure == INTERRUPTED:
            return joined
        rest = [
            part
            for part in left
            if part not in record.get("done", ()) and part != running
        ]
        if not rest or rest == left:
            return joined
        left = rest
        if time.monotonic() > deadline:
            joined["errors"] |= dict.fromkeys(left, "not started: no time was left")
            return joined


def _run_once(name, arguments, environment, deadline) -> tuple[dict, str]:
    """Run one process; return the record that it wrote, and why it failed, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "case.json")
        program = pathlib.Path(__file__).with_name("gpu.py")
        command = [
            sys.executable,
            str(program),
            "--child",
            name,
            "--json",
            str(out),
            *arguments,
        ]
        seconds = max(1.0, deadline - time.monotonic())
        try:
            done = subprocess.run(
                command, env=environment, timeout=seconds, stderr=subprocess.PIPE
            )
            said, failed = done.stderr.decode(errors="replace"), done.returncode != 0
            failure = f"exit status {done.returncode}: {said[-1500:]}" if failed else ""
        except subprocess.TimeoutExpired as expired:
            said = (expired.stderr or b"").decode(errors="replace")
            failure = f"took more than {seconds:.0f} s"
        except KeyboardInterrupt:  # what was measured until now is kept
            said, failure = "", INTERRUPTED
        sys.stderr.write(said)
        return json.loads(out.read_text()) if out.exists() else {}, failure
