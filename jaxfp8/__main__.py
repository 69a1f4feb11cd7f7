"""Print the environment and the active kernels; attach the output to bug reports.

A part that is missing or broken becomes a line with its error.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from ._jax._table import aligned
from .inspect import _machine


def text(machine: dict[str, Any]) -> str:
    """Write the result of `_machine.about` for people."""
    platform = machine["platform"]
    cublaslt = _or_error(machine["cublaslt"])
    if platform in ("cpu", "tpu") and cublaslt != machine["cublaslt"]:
        cublaslt = f"not needed on a {platform.upper()} ({cublaslt})"
    facts = {name: machine[name] for name in ("system", "processor", "driver")}
    facts |= {"cuBLASLt": cublaslt, "platform": platform, "kernels": _kernels(machine)}
    lines = [f"{name:9}  {_or_error(fact)}" for name, fact in facts.items()]
    for name, cells in _TABLES.items():
        lines += [name, *_rows(machine[name], cells)]
    return "\n".join(lines)


def _or_error(part) -> str:
    return part["error"] if isinstance(part, dict) else part or "none"


def _rows(part, cells: Callable[[Any], tuple[str, str]]) -> list[str]:
    """Return a line of two cells for each row or item of a part; for a part that
    failed, its error.
    """
    if "error" in part:
        return [f"  {part['error']}"]
    items = part.items() if isinstance(part, dict) else part
    rows = [("", *cells(item)) for item in items]
    return aligned(rows).splitlines() if rows else ["  none"]


def _device(row) -> tuple[str, str]:
    text = row["platform"]
    if row["capability"]:
        text += f", compute capability {row['capability']}"
    return f"{row['count']} x {row['kind']}", text


def _library(row) -> tuple[str, str]:
    text = row["error"] or f"loaded, for {row['built_for']}"
    if row["path"]:
        text += f" ({row['path']})"
    return row["platform"], text


def _kernels(machine) -> str:
    """Write whether every op that has a kernel for this platform runs it."""
    ops = machine["ops"]
    platform = machine["platform"]
    if "error" in ops or "error" in platform:
        return "unknown, because a part of this report failed"
    if platform == "tpu":
        return "none for a TPU: XLA compiles all ops, and on TPU v7 multiplies FP8"
    idle = [
        row["name"] for row in ops if not row["custom_call"] and not _is_intended(row)
    ]
    if idle:
        return (
            f"{len(idle)} of {len(ops)} ops run without their kernel; the reasons are "
            "below"
        )
    return f"all that exist for {platform} are active"


def _is_intended(row) -> bool:
    """Return whether an op lacks a kernel because none was written for the platform:
    nothing is missing then.
    """
    return row["why"].startswith(_machine.NO_KERNEL)


def _op(row) -> tuple[str, str]:
    """Write the program that runs an op, and why no custom call runs it."""
    program = f"jnp and {', '.join(row['calls'])}" if row["calls"] else "jnp"
    if row["custom_call"]:
        program = "custom call"
    elif _is_intended(row):
        program += ", as intended"
    elif row["why"]:
        program += f": {row['why']}"
    return row["name"], program


# The parts with many rows, and what writes the two cells of a row.
_TABLES = {
    "versions": tuple,
    "settings": tuple,
    "devices": _device,
    "libraries": _library,
    "ops": _op,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxfp8", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    machine = _machine.about()
    print(json.dumps(machine, indent=1) if args.json else text(machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
