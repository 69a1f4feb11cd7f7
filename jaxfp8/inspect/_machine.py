"""The machine that programs run on, and which implementation of every op it runs, and
why: what `python -m jaxfp8` prints.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from ..ops import _ffi, _support
from . import _op_calls

PACKAGES = (
    "jaxfp8 jaxfp8-cuda13 jaxfp8-cuda12 jax jaxlib jax-cuda13-plugin "
    "jax-cuda12-plugin jax-rocm7-plugin libtpu nvidia-cublas nvidia-cublas-cu12 flax "
    "optax numpy ml_dtypes"
).split()


def about() -> dict[str, Any]:
    """Return all that is known of the machine, as JSON values; a part that fails is
    `{"error": reason}`.
    """
    parts = {
        "versions": versions,
        "system": platform.platform,
        "processor": processor,
        "settings": settings,
        "platform": _support.backend,
        "devices": devices,
        "libraries": lambda: [library._asdict() for library in _ffi.LIBRARIES],
        "cublaslt": cublaslt,
        "ops": lambda: active_ops(_support.backend()),
    }
    # Each part fails by itself: a broken driver must not hide the versions.
    for name, part in parts.items():
        try:
            parts[name] = part()
        # a broken installation may raise anything, and the report has to show it
        except Exception as error:
            parts[name] = {"error": f"{type(error).__name__}: {error}"}
    return parts


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the installed packages of `packages`, by
    name.
    """
    versions = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def processor() -> str:
    """Return the system's name of the processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    name = re.search(r"^model name\s*:\s*(.*)", text, re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()


def devices() -> list[dict[str, Any]]:
    """Return the devices of JAX, a dict for each kind: `platform`, `kind`, `capability`
    (of a GPU) and `count`.
    """
    kinds = Counter()
    for device in jax.devices():
        capability = ".".join(map(str, _support.capability(device)))
        kinds[device.platform, device.device_kind, capability] += 1
    columns = "platform", "kind", "capability", "count"
    return [dict(zip(columns, (*kind, kinds[kind]), strict=True)) for kind in kinds]


def settings() -> dict[str, str]:
    """Return the environment variables that JAX and XLA read."""
    prefixes = "JAX", "XLA_"
    variables = sorted(os.environ.items())
    return {name: value for name, value in variables if name.startswith(prefixes)}


def cublaslt() -> str:
    """Return version and file of the cuBLASLt that products run on.

    Raises:
        RuntimeError: there is none.
    """
    if not (_ffi.has_cuda_kernels() and _support.local_gpus()):
        raise RuntimeError("not looked for: there is no CUDA library, or no NVIDIA GPU")
    version = _ffi.cublaslt_version()  # 130002 for 13.0.2
    major, minor = divmod(version, 10000)
    return f"{major}.{minor // 100}.{minor % 100} (libcublasLt.so.{major})"


# Matrices of 256 rows and columns, a multiple of every block.
EXAMPLE = _op_calls.Kind((256, 256, 256))
# The reason of an op that runs in jnp because no kernel of it exists for the platform:
# nothing is broken or missing.
NO_KERNEL = "no kernel for"


def active_ops(platform: str) -> list[dict[str, Any]]:
    """Return a row for each op on a platform: `name`, `custom_call`, whether the op
    runs as its custom call, and `why`, a clause that says why not, else "".
    """
    rows = []
    for name in _op_calls.OPS:
        function, arguments = _op_calls.call(name, EXAMPLE)
        with _support.listening() as reasons:
            try:
                traced = jax.jit(function).trace(*arguments)
                text = traced.lower(lowering_platforms=(platform,)).as_text()
            except NotImplementedError as error:
                text = ""
                reasons.append(f"{NO_KERNEL} {platform}, which refuses it: {error}")
        is_active = f"custom_call @jaxfp8_{name}_v" in text
        why = "" if is_active else "; ".join(reasons) or _why_not(platform, name)
        rows.append({"name": name, "custom_call": is_active, "why": why})
    return rows


def _why_not(platform: str, op: str) -> str:
    """Return why a program without warnings does not have the custom call of an op."""
    for library in _ffi.LIBRARIES:
        if library.platform == platform and op in library.ops:
            return f"the native library: {library.error}"
    return f"{NO_KERNEL} {platform}"
