"""Where a benchmark ran: processor, versions, commit."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys

import jax


def cpu_model() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parent).stdout.strip()


def environment(**more) -> dict:
    """What a result depends on; `more` is added to it."""
    # A copy of a checkout on another machine may have no history: JAXFP8_COMMIT names the commit there.
    commit = os.environ.get("JAXFP8_COMMIT") or _commit()
    return {
        "command": " ".join(["python", *sys.argv]),
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "commit": commit,
        **more,
    }
