"""The record of `python -m jaxfp8.selftest` on GPUs: a file in the user's cache folder, read when a program is lowered.

Each kind of GPU, driver and set of versions has a file, so that processes that write at once take nothing away.
"""

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from pathlib import Path

import jax

from .._jax import _files
from . import _ffi


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    version = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d[\d.]*", version.read_text() if version.exists() else "")
    return match.group() if match else ""


def key(kind: str) -> dict[str, str]:
    """Return the kind of a GPU, its driver, and the versions of the software that ran: a record is valid for these.

    Raises:
        OSError: the CUDA module's file cannot be read.
        RuntimeError: cuBLASLt cannot be opened.
    """
    # A module that was built again has the same version, so its bytes count.
    with open(_ffi.module_path("_cuda") or "_cuda", "rb") as file:
        module = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "device": kind,
        "driver": driver(),
        "jaxfp8": importlib.metadata.version("jaxfp8"),
        "jax": jax.__version__,
        "cublaslt": str(_ffi.cublaslt_version()),
        "module": module,
    }


def path(key: dict[str, str]) -> Path:
    """Return the file of a key; RuntimeError where the system names no home folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = cache if cache.is_absolute() else Path.home() / ".cache"
    return cache / "jaxfp8" / f"selftest-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"


@functools.cache
def read(kind: str) -> dict:
    """Return the record of a kind of GPU with this driver and these versions; `{}` where there is no valid one.

    Returns:
        `date`, the day of the run; `failed`, the names of the checks that failed, such as `"values:amax"`.
    """
    try:
        expected = key(kind)
        file = path(expected)
        # Opening a pipe would wait for its writer.
        record = json.loads(file.read_text()) if file.is_file() else {}
        is_valid = record["key"] == expected
        return {"date": str(record["date"]), "failed": list(map(str, record["failed"]))} if is_valid else {}
    except Exception:  # whatever the file has, or stands in its place: programs run as without it
        return {}


def write(key: dict[str, str], failed: list[str]) -> Path:
    """Record a run of today in which these checks failed, and return the file.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: the system names no home folder.
    """
    file = path(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    with _files.replaced(file, "w") as opened:
        json.dump({"key": key, "date": datetime.date.today().isoformat(), "failed": failed}, opened, indent=1)
    return file
