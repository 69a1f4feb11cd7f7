"""Print the environment and the active kernels; attach the output to bug reports.

A part that is missing or broken becomes a line with its error.
"""

import argparse
import json
import sys
import textwrap
from typing import Any

from ._jax._table import aligned, table
from .inspect import _machine

_COLUMNS = {
    "devices": ("count", "platform", "kind", "capability"),
    "libraries": ("platform", "built_for", "path", "error"),
    "ops": ("name", "custom_call", "why"),
}


def text(machine: dict[str, Any]) -> str:
    """Write the result of `_machine.about` for people."""
    lines = []
    for name, part in ({"kernels": _kernels(machine)} | machine).items():
        if isinstance(part, dict):
            part = part.get("error") or aligned(part.items())
        elif name in _COLUMNS:
            part = table(part, _COLUMNS[name])
        lines += [name, textwrap.indent(part or "none", "  ")]
    return "\n".join(lines)


def _kernels(machine) -> str:
    """Write whether every op that has a kernel for this platform runs it."""
    ops, platform = machine["ops"], machine["platform"]
    if "error" in ops or "error" in platform:
        return "unknown, because a part of this report failed"
    idle = 0
    for row in ops:
        # Nothing is missing where no kernel was written for the platform.
        is_intended = row["why"].startswith(_machine.NO_KERNEL)
        idle += not (row["custom_call"] or is_intended)
    if idle:
        return (
            f"{idle} of {len(ops)} ops run without their kernel; the reasons are below"
        )
    active = sum(row["custom_call"] for row in ops)
    return f"{active} of {len(ops)} ops run a kernel, all that exist for {platform}"


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
