"""Check every op on this machine against the reference, and measure it; write a file to
attach to a bug report.

Every check runs in a process that may crash. Where an op fails, the command prints the
value of JAXFP8_DISABLE that switches it off. Nothing is kept for later programs.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from .._jax import _files
from .._jax._table import aligned
from ..inspect import _op_calls
from ..ops import _support
from . import _checks, _workers

_COLUMNS = (
    "op",
    "runs",
    "values",
    "in a graph",
    "us",
    "GB/s",
    "TFLOP/s",
    "of copy or bf16",
)


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
    parser.add_argument("--no-speed", action="store_true", help="no times")
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

    def part(name, text):
        section = about.get(name, {})
        return section["error"] if "error" in section else text(section)

    devices = part(
        "devices",
        lambda rows: ", ".join(f"{row['count']} x {row['kind']}" for row in rows),
    )
    versions = part(
        "versions",
        lambda row: ", ".join(f"{name} {row.get(name)}" for name in ("jaxfp8", "jax")),
    )
    is_broken = "error" in about or "error" in about.get("devices", {})
    detail = about.get("error") or f"{devices}; {versions}"
    return {
        "check": "machine",
        "status": "failed" if is_broken else "passed",
        "detail": detail,
    }


def checks(ops: list[str], platform: str | None) -> tuple[list[list[str]], list[str]]:
    """Return the jobs that may run side by side, and the checks that must run alone.

    On a GPU each check has a process of its own, so that its launch is the first in the
    process. A TPU serves one process at a time.
    """
    on_gpu = platform == "cuda"
    names = [
        "library",
        "training",
        *[f"graph:{op}" for op in ops if on_gpu],
        *[f"values:{op}" for op in ops],
    ]
    # On a CPU two processes share the checks; a process that dies fails one check only
    # (`_workers.finish`).
    jobs = [names[::2], names[1::2]]
    if platform == "tpu":
        jobs = [names]
    if on_gpu:
        jobs = [[name] for name in names]
    return jobs, [f"speed:{op}" for op in (*_checks.BASELINES, *ops)]


def table(rows: list[dict]) -> str:
    """Return the rows as a table for people: a line for each op, then the checks of the
    machine and the failures.
    """
    by_name = {row["check"]: row for row in rows}

    def status(name):
        return by_name.get(name, {}).get("status", "-").replace("failed", "FAILED")

    def figures(op):
        row = by_name.get(f"speed:{op}", {})
        # A product is compared with a product in bfloat16, every other op with the copy
        # of an array.
        key, bound = "gb_per_s", "copy"
        if "tflops" in row:
            key, bound = "tflops", "bf16 product"
        best = by_name.get(f"speed:{bound}", {}).get(key)
        cells = [
            f"{row[name]:.4g}" if name in row else "-"
            for name in ("us", "gb_per_s", "tflops")
        ]
        return [*cells, f"{row[key] / best:.0%}" if best and key in row else "-"]

    lines = [_COLUMNS]
    for op in (*_checks.BASELINES, *_op_calls.OPS):
        if not any(name.endswith(f":{op}") for name in by_name):
            continue
        calls = by_name.get(f"values:{op}", {}).get("custom_calls")
        runs = "custom call" if calls else "jnp"
        if calls is None:
            runs = "-"
        checked = status(f"values:{op}"), status(f"graph:{op}")
        lines.append((op, runs, *checked, *figures(op)))
    # A check without an op in its name checks the machine.
    machine_rows = [
        f"{name}: {row['status']}, {row['detail']}"
        for name, row in by_name.items()
        if ":" not in name
    ]
    whys = [
        f"{row['check'].partition(':')[2]} runs in jnp: {row['why']}"
        for row in rows
        if row.get("why")
    ]
    failed = [
        f"FAILED {row['check']}: {row['detail']}"
        for row in rows
        if row["status"] == "failed"
    ]
    return "\n".join([aligned(lines, right=4), *machine_rows, *whys, *failed])


def ops_in(checks: list[str]) -> list[str]:
    """Return the ops that checks such as "values:amax" are about."""
    return [
        op for op in _op_calls.OPS if any(name.endswith(f":{op}") for name in checks)
    ]


def remedy(rows: list[dict]) -> str:
    """Return the setting that switches off the ops that failed and those that are off;
    "" where it would not help.
    """
    failed = [row["check"] for row in rows if row["status"] == "failed"]
    # Without a device or a library no op runs, so switching off some of them would not
    # help.
    if "machine" in failed or "library" in failed:
        return ""
    # On a device that others keep busy every time is too long.
    if any(f"speed:{name}" in failed for name in _checks.BASELINES):
        failed = [check for check in failed if not check.startswith("speed:")]
    bad = ops_in(failed)
    off = os.environ.get(_support.VARIABLE, "").split(",")
    names = dict.fromkeys(filter(None, [*off, *bad]))
    return f"{_support.VARIABLE}={','.join(names)}" if bad else ""


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    args = parse_arguments(argv)
    if args.worker:
        _workers.work(args.worker, args.timeout, args.quick)
        return 0
    start = time.perf_counter()
    about = environment()
    parallel, serial = checks(args.only, about.get("platform"))
    rows = [machine(about)]
    rows += _workers.finish(
        parallel, args.timeout, args.quick, min(12, os.cpu_count() or 1)
    )
    # Times are taken one after the other, when nothing else runs.
    if not args.no_speed:
        rows += _workers.finish([serial], args.timeout, args.quick, 1)
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
