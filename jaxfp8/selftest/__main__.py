"""Check every op on this machine against the reference; write a file to attach to a bug
report.

Every check runs in a process that may crash. Where an op fails, the command prints the
value of JAXFP8_DISABLE that switches it off. Nothing is kept for later programs.
"""

import argparse
import json
import os
import sys
import time

from .._jax._table import table
from ..inspect import _op_calls
from ..ops import _support
from . import _workers

_COLUMNS = ("status", "check", "detail")


def jobs(ops: list[str], platform: str | None) -> list[list[str]]:
    """Return the checks, divided among processes that may run side by side.

    On a GPU each check has a process of its own, so that its launch is the first in the
    process. A TPU serves one process at a time.
    """
    names = ["training", *ops]
    processes = {"cuda": len(names), "tpu": 1}.get(platform, 2)
    return [names[i::processes] for i in range(processes)]


def remedy(rows: list[dict]) -> str:
    """Return the setting that switches off the ops that failed and those that are off;
    "" where it would not help.
    """
    failed = {row["check"] for row in rows if row["status"] == "failed"}
    # Without a device or a library no op runs, so switching off some of them would not
    # help.
    bad = failed - {"training"}
    if not bad or "machine" in bad:
        return ""
    off = _support.parsed(os.environ.get(_support.VARIABLE, ""))
    return f"{_support.VARIABLE}={','.join(sorted(off | bad))}"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxfp8.selftest", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--json", metavar="PATH", help="write everything here")
    ops = list(_op_calls.OPS)
    parser.add_argument("--only", metavar="OP", nargs="+", choices=ops, default=ops)
    args = parser.parse_args(argv)
    start = time.perf_counter()
    # What the machine has decides how the other checks run.
    (machine,) = _workers.finish([["machine"]])
    about = machine.pop("environment", {})
    side_by_side = jobs(args.only, about.get("platform"))
    rows = [machine, *_workers.finish(side_by_side)]
    passed = all(row["status"] == "passed" for row in rows)
    seconds = time.perf_counter() - start
    if args.json:
        report = {
            "passed": passed,
            "seconds": seconds,
            "rows": rows,
            "environment": about,
        }
        with open(args.json, "w") as file:
            json.dump(report, file, indent=1)
    # What failed is above the last line, where a reader begins.
    rows.sort(key=lambda row: row["status"] == "failed")
    print(table(rows, _COLUMNS))
    if switch := remedy(rows):
        print(f"until it is repaired, set {switch}")
    print(f"{'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
