"""The machine that programs run on, and which implementation of every op and recipe it
runs, and why: what `python -m jaxfp8` prints.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import recipes
from ..dot import dot_general
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
    # Each part fails by itself: a broken driver must not hide the versions.
    return {
        "versions": _try(versions),
        "system": platform.platform(),
        "processor": _try(processor),
        "settings": _try(settings),
        "platform": _try(_support.backend),
        "devices": _try(devices),
        "driver": _try(_support.driver),
        "libraries": _try(lambda: [library._asdict() for library in _ffi.libraries()]),
        "cublaslt": _try(cublaslt),
        "ops": _try(lambda: active_ops(_support.backend())),
        "recipes": _try(lambda: active_recipes(_support.backend())),
    }


def _try(part: Callable[[], Any]) -> Any:
    try:
        return part()
    # a broken installation may raise anything, and the report has to show it
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


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
    for d in jax.devices():
        capability = ".".join(map(str, _support.capability(d)))
        kinds[d.platform, d.device_kind, capability] += 1
    names = ("platform", "kind", "capability", "count")
    return [dict(zip(names, (*kind, n), strict=True)) for kind, n in kinds.items()]


def settings() -> dict[str, str]:
    """Return the environment variables that JAX and XLA read."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("JAX_", "XLA_", "JAXFP8_"))
    }


def cublaslt() -> str:
    """Return version and file of the cuBLASLt that products run on.

    Raises:
        RuntimeError: there is none.
    """
    if not _ffi.has_cuda_kernels():
        raise RuntimeError("not looked for, as there is no CUDA library")
    version = _ffi.cublaslt_version()  # 130002 for 13.0.2
    major, minor = divmod(version, 10000)
    return f"{major}.{minor // 100}.{minor % 100} (libcublasLt.so.{major})"


_N = 256  # a multiple of every block
_X = jax.ShapeDtypeStruct((_N, _N), jnp.bfloat16)
_KERNEL = jax.ShapeDtypeStruct((_N, _N), jnp.float32)
RECIPES = (
    recipes.DelayedScaling(),
    recipes.Float8CurrentScaling(),
    recipes.Float8RowwiseScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
)
# By the name of each op, a function that calls the op, and the function's arguments.
_KINDS = {op: _op_calls.Kind.square(op, _N) for op in _op_calls.OPS}
OPS = {op: _op_calls.call(op, kind)[:2] for op, kind in _KINDS.items()}
# The reason of an op that runs in jnp because no kernel of it exists for the platform:
# nothing is broken or missing.
NO_KERNEL = "no kernel for"
_FP8_DOT = re.compile(
    r"stablehlo\.dot_general .*\(tensor<\w*xf8E\w+>, tensor<\w*xf8E\w+>\)"
)


def active_ops(platform: str) -> list[dict[str, Any]]:
    """Return a row for each op on a platform: `name`, `custom_call`, `calls` and `why`.

    `custom_call` says whether the op runs as its custom call, `calls` counts the custom
    calls in its program by name, and `why` is a clause that says why the op does not
    run as its custom call, else "".
    """
    rows = []
    for name, call in OPS.items():
        calls, reasons, _ = _lowered(platform, *call)
        why = "" if name in calls else _why_not(platform, name, reasons)
        row = {"name": name, "custom_call": name in calls, "calls": calls, "why": why}
        rows.append(row)
    return rows


def active_recipes(platform: str) -> list[dict[str, Any]]:
    """Return a row for each recipe, from forward and backward of a layer: `name`,
    `fp8_products`, `calls` and `why`.

    `fp8_products` counts the products, of 3, that run as FP8 kernels (on TPUs the
    products of FP8 operands that XLA compiles), `calls` counts custom calls by name,
    and `why` is a clause that says why fewer than 3 products run so, else "".
    """
    rows = []
    for recipe in RECIPES:
        calls, reasons, products = _lowered(platform, *_layer(recipe))
        if platform != "tpu":
            products = calls["scaled_matmul"] + calls["block_scaled_matmul"]
        why = "" if products == 3 else _why_not(platform, "scaled_matmul", reasons)
        row = {"name": type(recipe).__name__, "fp8_products": products}
        rows.append(row | {"calls": calls, "why": why})
    return rows


def _layer(recipe) -> tuple:
    """Return forward and backward of a layer, and the types of its arguments."""

    def loss(x, kernel, state):
        return dot_general(
            x, kernel, (((1,), (0,)), ((), ())), recipe=recipe, state=state
        ).sum()

    # Types are enough: programs are lowered and never run, also for platforms that this
    # machine lacks.
    state = jax.eval_shape(lambda: recipes.init_state(recipe))
    return jax.value_and_grad(loss, argnums=(0, 1, 2)), (_X, _KERNEL, state)


def _lowered(platform, function, arguments) -> tuple[Counter, list[str], int]:
    """Return what a program has: the number of each custom call, warnings of its
    lowering, products of FP8 operands.

    A program that its platform refuses has the refusal as its only warning.
    """
    try:
        with _support.listening() as reasons:
            # Make a new function for each call: JAX does not lower the same function
            # twice.
            traced = jax.jit(lambda *args: function(*args)).trace(*arguments)
            text = traced.lower(lowering_platforms=(platform,)).as_text()
    except NotImplementedError as error:
        return Counter(), [f"refused: {error}"], 0
    calls = sorted(re.findall(r"custom_call @jaxfp8_(\w+?)_v\d+\b", text))
    return Counter(calls), reasons, len(_FP8_DOT.findall(text))


def _why_not(platform: str, target: str, reasons: list[str]) -> str:
    """Return why the custom call is not in a program: the warnings of its lowering, or
    what the native library lacks; "" where no reason is known.
    """
    if reasons:
        return "; ".join(reasons)
    if platform == "tpu":  # XLA compiles the jnp programs
        return f"{NO_KERNEL} {platform}"
    for library in _ffi.libraries():
        if library.platform == platform:
            if target not in library.ops:
                return f"{NO_KERNEL} {platform}"
            return library.error and f"the native library: {library.error}"
    return f"no native library serves {platform}"
