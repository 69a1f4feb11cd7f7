"""Print the environment and the active kernels; attach the output to bug reports.

A part that is missing or broken becomes a line with its error.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable
from typing import Any

from ._jax._table import aligned
from .inspect import _machine
from .ops import _ffi, _support


def about() -> dict[str, Any]:
    """Return all parts that the command prints, as JSON values; a part that fails is
    `{"error": reason}`.
    """
    # Each part fails by itself: a broken driver must not hide the versions.
    return {
        "versions": _try(_machine.versions),
        "system": platform.platform(),
        "processor": _try(_machine.processor),
        "settings": _try(_machine.settings),
        "platform": _try(_support.backend),
        "devices": _try(_machine.devices),
        "driver": _try(_support.driver),
        "libraries": _try(lambda: [library._asdict() for library in _ffi.libraries()]),
        "cublaslt": _try(cublaslt),
        "ops": _try(lambda: _machine.active_ops(_support.backend())),
        "recipes": _try(lambda: _machine.active_recipes(_support.backend())),
    }


def cublaslt() -> dict[str, str]:
    """Return `library` and `version` of the cuBLASLt that products run on, or
    `{"error": reason}`.
    """
    if not _ffi.has_cuda_kernels():
        return {"error": "not looked for, as there is no CUDA library"}
    try:
        version = _ffi.cublaslt_version()  # 130002 for 13.0.2
    except RuntimeError as error:
        return {"error": str(error)}
    major = version // 10000
    return {
        "library": f"libcublasLt.so.{major}",
        "version": f"{major}.{version // 100 % 100}.{version % 100}",
    }


def _try(part: Callable[[], Any]) -> Any:
    try:
        return part()
    # a broken installation may raise anything, and the report has to show it
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def text(machine: dict[str, Any]) -> str:
    """Write the result of `about` for people."""
    # Any part may be an error in place of its value; `_rows` and `_or_error` then write
    # the error.
    platform = machine["platform"]
    cublaslt = machine["cublaslt"]
    version = cublaslt.get("error") or f"{cublaslt['version']} ({cublaslt['library']})"
    if platform in ("cpu", "tpu") and "error" in cublaslt:
        version = f"not needed on a {platform.upper()} ({version})"
    driver = machine["driver"]
    lines = [
        "versions",
        *_rows(machine["versions"], tuple),
        f"system     {machine['system']}",
        f"processor  {_or_error(machine['processor'])}",
        "settings",
        *(_rows(machine["settings"], tuple) or ["  none"]),
        "devices",
        *_rows(machine["devices"], _device),
        *[f"driver     {_or_error(driver)}"] * bool(driver),
        "libraries",
        *_rows(machine["libraries"], _library),
        f"cuBLASLt   {version}",
        f"kernels    {_kernels(machine)}",
        f"ops on {_or_error(platform)}",
        *_rows(machine["ops"], lambda row: (row["name"], _runs(row))),
        "recipes, forward and backward of a layer",
        *_rows(machine["recipes"], lambda row: (row["name"], _recipe(row))),
    ]
    return "\n".join(lines)


def _or_error(part) -> str:
    return part["error"] if isinstance(part, dict) else part


def _rows(part, cells: Callable[[Any], tuple[str, str]]) -> list[str]:
    """Return a line of two cells for each row or item of a part; for a part that
    failed, its error.
    """
    if "error" in part:
        return [f"  {part['error']}"]
    items = part.items() if isinstance(part, dict) else part
    rows = [("", *cells(item)) for item in items]
    return aligned(rows).splitlines() if rows else []


def _device(row) -> tuple[str, str]:
    text = row["platform"]
    if row["capability"]:
        text += f", compute capability {row['capability']}"
    return f"{row['count']} x {row['kind']}", text


def _library(row) -> tuple[str, str]:
    text = row["error"]
    if not text:
        use = "in use" if row["platform"] == "cpu" else "built for"
        text = f"loaded, {use}: {row['built_for']}"
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
    """Return whether a row lacks a kernel because none was written for the platform:
    nothing is missing then.
    """
    return row["why"].startswith(_machine.NO_KERNEL)


def _runs(row) -> str:
    """Write a cell: the program that runs the op, and why no custom call runs it."""
    if row["custom_call"]:
        return "custom call"
    if row["why"].startswith(_machine.REFUSED):
        return row["why"]
    program = f"jnp and {', '.join(row['calls'])}" if row["calls"] else "jnp"
    if _is_intended(row):
        return f"{program}, as intended"
    return f"{program}: {row['why']}" if row["why"] else program


def _recipe(row) -> str:
    """Write a cell: the precision that multiplies the codes of the three products, and
    the custom calls.
    """
    if row["why"].startswith(_machine.REFUSED):
        return row["why"]
    count = row["fp8_products"]
    if count and not row["calls"]:
        return f"{count} of 3 products of FP8 operands, compiled by XLA"
    products = f"{count} of 3 products by FP8 kernels"
    if _is_intended(row):
        products = "3 products of FP8 codes, multiplied in high precision as intended"
    elif row["why"]:
        products += f" ({row['why']})"
    calls = ", ".join(f"{count} {name}" for name, count in row["calls"].items())
    return f"{products}; custom calls: {calls or 'none'}"


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxfp8", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    machine = about()
    print(json.dumps(machine, indent=1) if args.json else text(machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
