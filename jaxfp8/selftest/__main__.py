"""Check every op on this machine against the reference; write a file to attach to a bug
report.

Every check runs in a process that may crash. Where an op fails, the command prints the
value of JAXFP8_DISABLE that switches it off. Nothing is kept for later programs.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable

from .._jax import _files
from .._jax._table import aligned
from ..inspect import _op_calls
from ..ops import _support
from . import _workers

_COLUMNS = ("op", "runs", "values", "in a graph")


def parse_arguments(argv=None) -> argparse.Namespace:
    """Read the command line; an option that makes no sense ends the program with a
    message.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jaxfp8.selftest", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--json", metavar="PATH", help="write everything here")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument(
        "--only", metavar="OP,OP", help=f"of {', '.join(_op_calls.OPS)} (default: all)"
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=150,
        help="seconds a check may take (default: 150)",
    )
    parser.add_argument("--worker", nargs="+", metavar="CHECK", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else list(_op_calls.OPS)
    if unknown := set(args.only) - set(_op_calls.OPS):
        parser.error(
            f"--only: expected names out of {', '.join(_op_calls.OPS)}, got "
            f"{', '.join(sorted(unknown))}"
        )
    return args


def environment() -> dict:
    """Return the output of `python -m jaxfp8 --json`, or `{"error": reason}`."""
    # This needs a process of its own: the GPU would stay in use while workers need it,
    # and a driver that crashes would end the command.
    done = subprocess.run(
        [sys.executable, "-m", "jaxfp8", "--json"], capture_output=True, text=True
    )
    return (
        json.loads(done.stdout)
        if done.returncode == 0
        else {"error": done.stderr[-4000:] or str(done.returncode)}
    )


def machine(about: dict) -> dict:
    """Return the row of the check "machine", with its devices and versions."""
    devices = about.get("devices", [])
    versions = about.get("versions", {})
    error = about.get("error")
    if "error" in devices:
        error = devices["error"]
    kinds = error or ", ".join(f"{row['count']} x {row['kind']}" for row in devices)
    packages = f"jaxfp8 {versions.get('jaxfp8')}, jax {versions.get('jax')}"
    return {
        "check": "machine",
        "status": "failed" if error else "passed",
        "detail": f"{kinds}; {packages}",
    }


def jobs(ops: list[str], platform: str | None) -> list[list[str]]:
    """Return the checks, divided among processes that may run side by side.

    On a GPU each check has a process of its own, so that its launch is the first in the
    process. A TPU serves one process at a time.
    """
    names = ["library", "training", *[f"values:{op}" for op in ops]]
    if platform == "cuda":
        names[2:2] = [f"graph:{op}" for op in ops]
        return [[name] for name in names]
    if platform == "tpu":
        return [names]
    # On a CPU two processes share the checks; a process that dies fails one check only
    # (`_workers.finish`).
    return [names[::2], names[1::2]]


def table(rows: list[dict]) -> str:
    """Return the rows as a table for people: a line for each op, then the checks of the
    machine and the failures.
    """
    by_name = {row["check"]: row for row in rows}
    lines = [_COLUMNS]
    after = []
    for op in ops_in(by_name):
        values = by_name.get(f"values:{op}", {})
        graph = by_name.get(f"graph:{op}", {})
        runs = "-"
        if "custom_calls" in values:
            runs = "custom call" if values["custom_calls"] else "jnp"
        lines.append((op, runs, values.get("status", "-"), graph.get("status", "-")))
        if values.get("why"):
            after.append(f"{op} runs in jnp: {values['why']}")
    for name, row in by_name.items():
        # A check without an op in its name checks the machine.
        if ":" not in name:
            after.append(f"{name}: {row['status']}, {row['detail']}")
        elif row["status"] == "failed":
            after.append(f"FAILED {name}: {row['detail']}")
    return "\n".join([aligned(lines), *after])


def ops_in(checks: Iterable[str]) -> list[str]:
    """Return the ops that checks such as "values:amax" are about."""
    named = {name.partition(":")[2] for name in checks}
    return [op for op in _op_calls.OPS if op in named]


def remedy(rows: list[dict]) -> str:
    """Return the setting that switches off the ops that failed and those that are off;
    "" where it would not help.
    """
    failed = [row["check"] for row in rows if row["status"] == "failed"]
    bad = ops_in(failed)
    # Without a device or a library no op runs, so switching off some of them would not
    # help.
    if not bad or "machine" in failed or "library" in failed:
        return ""
    off = os.environ.get(_support.VARIABLE, "").split(",")
    names = dict.fromkeys(filter(None, [*off, *bad]))
    return f"{_support.VARIABLE}={','.join(names)}"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = parse_arguments(argv)
    if args.worker:
        _workers.work(args.worker, args.timeout, args.quick)
        return 0
    start = time.perf_counter()
    about = environment()
    side_by_side = jobs(args.only, about.get("platform"))
    rows = _workers.finish(side_by_side, args.timeout, args.quick)
    rows.insert(0, machine(about))
    passed = all(row["status"] == "passed" for row in rows)
    seconds = time.perf_counter() - start
    report = {
        "passed": passed,
        "seconds": seconds,
        "quick": args.quick,
        "rows": rows,
        "environment": about,
    }
    if args.json:
        with _files.replaced(args.json, "w") as file:
            json.dump(report, file, indent=1)
    print(table(rows))
    if switch := remedy(rows):
        print(f"until it is repaired, set {switch}")
    print(f"{'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
