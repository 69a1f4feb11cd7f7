"""Where a benchmark ran: processor, versions, commit; the options that many have; and
the file of its results.
"""

import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys

from jaxfp8.inspect._machine import processor, versions


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parent
    ).stdout.strip()


def result_parser(
    description: str, turns: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the option `--json`, a path or None, and with `--turns`
    where that has a default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="where to write the results and the environment",
    )
    if turns is not None:
        parser.add_argument(
            "--turns", type=int, default=turns, help="timed calls of each candidate"
        )
    return parser


def shown_environment(**more) -> dict:
    """Print and return the environment."""
    described = environment(**more)
    for key, value in described.items():
        print(f"{key}: {value}")
    return described


def write(path: pathlib.Path | None, **parts) -> None:
    """Write the parts of a result as JSON; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(parts, indent=1) + "\n")


def environment(**more) -> dict:
    """Return the command, the machine, the versions and the commit of a result, and
    `more`.
    """
    # A copy of a checkout on another machine may have no history: JAXFP8_COMMIT names
    # the commit there.
    commit = os.environ.get("JAXFP8_COMMIT") or _commit()
    # A result names no folder of the machine: the last part of an absolute path is
    # kept.
    words = [
        pathlib.Path(word).name if os.path.isabs(word) else word for word in sys.argv
    ]
    return {
        "command": " ".join(["python", *words]),
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        **versions(("jax", "jaxlib")),
        "commit": commit,
        **more,
    }
