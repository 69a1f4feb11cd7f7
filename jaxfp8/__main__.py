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
    """Write how many ops run their kernel, and how many have none for the platform,
    where nothing is missing.
    """
    ops = machine["ops"]
    if "error" in ops:
        return "unknown, because a part of this report failed"
    whys = [row["why"] for row in ops if row["why"]]
    without = sum(why.startswith(_machine.NO_KERNEL) for why in whys)
    return (
        f"{len(ops) - len(whys)} ops run their kernel, {len(whys) - without} do not, "
        f"{without} have none for {machine['platform']}"
    )


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
