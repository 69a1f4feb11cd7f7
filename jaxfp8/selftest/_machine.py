"""The machine that programs run on: versions, processor, devices, settings."""

import importlib.metadata
import os
import pathlib
import platform
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from ..ops import _support

PACKAGES = (
    "jaxfp8 jax jaxlib jax-cuda13-plugin jax-cuda12-plugin jax-rocm7-plugin libtpu nvidia-cublas "
    "flax optax numpy ml_dtypes"
).split()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages of `packages`, by name."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return versions


def processor() -> str:
    """Return the system's name of the processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver() -> str:
    """Return the version of NVIDIA's driver; empty where there is none."""
    version = pathlib.Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d[\d.]*", version.read_text() if version.exists() else "")
    return match.group() if match else ""


def devices() -> list[dict[str, Any]]:
    """Return the devices of JAX, a dict for each kind: `platform`, `kind`, `capability` (of a GPU) and `count`."""
    kinds = Counter((d.platform, d.device_kind, ".".join(map(str, _support.capability(d)))) for d in jax.devices())
    names = ("platform", "kind", "capability", "count")
    return [dict(zip(names, (*kind, count), strict=True)) for kind, count in kinds.items()]


def settings() -> dict[str, str]:
    """Return the environment variables that JAX and XLA read."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(("JAX_", "XLA_", "JAXFP8_"))}
