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
    cublaslt = machine["cublaslt"]
    lines = ["versions", *_rows(machine["versions"], lambda item: item)]
    lines += [
        f"system     {machine['system']}",
        f"processor  {_or_error(machine['processor'])}",
    ]
    lines += [
        "settings",
        *(_rows(machine["settings"], lambda item: item) or ["  none"]),
    ]
    lines += [
        "devices",
        *_rows(
            machine["devices"],
            lambda row: (f"{row['count']} x {row['kind']}", _device(row)),
        ),
    ]
    lines += [f"driver     {_or_error(machine['driver'])}"] * bool(machine["driver"])
    lines += [
        "libraries",
        *_rows(machine["libraries"], lambda row: (row["platform"], _library(row))),
    ]
    version = cublaslt.get("error") or f"{cublaslt['version']} ({cublaslt['library']})"
    if machine["platform"] in ("cpu", "tpu") and "error" in cublaslt:
        version = f"not needed on a {machine['platform'].upper()} ({version})"
    lines += [f"cuBLASLt   {version}"]
    lines += [f"kernels    {_kernels(machine)}"]
    lines += [f"ops on {_or_error(machine['platform'])}"]
    lines += _rows(machine["ops"], lambda row: (row["name"], _runs(row)))
    lines += ["recipes, forward and backward of a layer"]
    lines += _rows(machine["recipes"], lambda row: (row["name"], _recipe(row)))
    return "\n".join(lines)


def _or_error(part) -> str:
    return part["error"] if isinstance(part, dict) else part


def _rows(part, cells: Callable[[Any], tuple[str, str]]) -> list[str]:
    """Return a line of two cells for each row or item of a part; for a part that
    failed, its error.
    """
    if "error" in part:
        return [f"  {part['error']}"]
    rows = [
        ("", *cells(row)) for row in (part.items() if isinstance(part, dict) else part)
    ]
    return aligned(rows).splitlines() if rows else []


def _device(row) -> str:
    return (
        f"{row['platform']}"
        f"{', compute capability ' + row['capability'] if row['capability'] else ''}"
    )


def _library(row) -> str:
    if row["error"]:
        return row["error"] + (f" ({row['path']})" if row["path"] else "")
    return (
        f"loaded, {'in use' if row['platform'] == 'cpu' else 'built for'}: "
        f"{row['built_for']} ({row['path']})"
    )


def _kernels(machine) -> str:
    """Write whether every op that has a kernel for this platform runs it."""
    ops, platform = machine["ops"], machine["platform"]
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
    program = f"jnp and {', '.join(row['calls'])}" if row["calls"] else "jnp"
    if _is_intended(row):
        return f"{program}, as intended"
    if row["why"].startswith(_machine.REFUSED):
        return row["why"]
    return f"{program}: {row['why']}" if row["why"] else program


def _recipe(row) -> str:
    """Write a cell: the precision that multiplies the codes of the three products, and
    the custom calls.
    """
    calls = (
        ", ".join(f"{count} {name}" for name, count in row["calls"].items()) or "none"
    )
    if row["why"].startswith(_machine.REFUSED):
        return row["why"]
    if row["fp8_products"] and not row["calls"]:
        return f"{row['fp8_products']} of 3 products of FP8 operands, compiled by XLA"
    if _is_intended(row):
        return (
            "3 products of FP8 codes, multiplied in high precision as intended; "
            f"custom calls: {calls}"
        )
    why = f" ({row['why']})" if row["why"] else ""
    return (
        f"{row['fp8_products']} of 3 products by FP8 kernels{why}; custom calls: "
        f"{calls}"
    )


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
