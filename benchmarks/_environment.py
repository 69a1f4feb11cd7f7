"""Where a benchmark ran: processor, versions, commit; and the option that says where to
write that.
"""

import argparse
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


def result_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the option `--json`, a path or None."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="where to write the results and the environment",
    )
    return parser


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
