"""The compiled modules `_cpu` and `_cuda`, and their custom calls: names, registration
and calls.

The only code that sees these modules. Importing this file registers every custom-call
target, so that exported programs and compile caches load after `import jaxfp8` alone.

A build puts the modules into `jaxfp8`, and `_modules.txt` beside them: each line says
how a module was built, or why it was not. A package index has `_cuda` in projects of
its own, one for each version of CUDA.
"""

import importlib.metadata
import importlib.util
import itertools
import logging
import sys
from pathlib import Path
from typing import NamedTuple

import jax

# Versions of custom calls, by the platforms that have a handler. A version goes up when
# the handler's contract changes.
_ON_BOTH = {
    "adam_update": 1,
    "amax": 1,
    "amax_to_scale": 1,
    "delayed_scales": 3,
    "dequantize": 1,
    "encode_moment": 1,
    "quantize": 3,
    "quantize_blocks_transpose": 2,
    "quantize_transpose": 3,
    "read_histories": 3,
    "write_histories": 5,
}
_CUDA_ONLY = {
    "block_scaled_matmul": 1,
    "quantize_activation": 2,
    "quantize_activation_grad": 1,
    "quantize_norm": 2,
    "quantize_pair": 1,
    "ragged_matmul": 1,
    "read_rows": 1,
    "scaled_matmul": 2,
    "transpose_codes": 1,
    "write_rows": 1,
}
_CPU_ONLY = {
    "decode_moment": 1,
    "join_recorded": 1,
    "split_reading": 1,
    "undo_factors": 1,
}
OPS = _ON_BOTH | _CUDA_ONLY | _CPU_ONLY
_TARGETS = {"cpu": _ON_BOTH | _CPU_ONLY, "CUDA": _ON_BOTH | _CUDA_ONLY}
_modules = {}  # platform -> compiled module in use
_log = logging.getLogger("jaxfp8")
_PACKAGE = __package__.split(".")[0]
# Which packages may hold a module, the first one first. JAX too prefers its plugin for
# CUDA 13.
_PACKAGES = (_PACKAGE, "jaxfp8_cuda13", "jaxfp8_cuda12")
# This file lies beside the sources, which a Python that is started in a checkout
# imports.
_SOURCES = Path(__file__).parents[2] / "CMakeLists.txt"


class Library(NamedTuple):
    """A compiled module of this installation.

    Attributes:
        platform: `"cpu"` or `"cuda"`.
        path: the module's file; None where this installation has no such file.
        error: why the module is not loaded, a clause; empty where the module is loaded.
        built_for: the CPU's instruction set in use, or the GPU architectures with code;
            empty if not loaded.
        ops: the ops that have a custom call on this platform.
    """

    platform: str
    path: str | None
    error: str
    built_for: str
    ops: tuple[str, ...]


def target_name(op):
    """Return the name of the custom call of `op`."""
    return f"jaxfp8_{op}_v{OPS[op]}"


def custom_call_targets() -> tuple[str, ...]:
    """Return the names of all custom calls, for
    `jax.export.DisabledSafetyCheck.custom_call`.
    """
    return tuple(map(target_name, OPS))


class Unavailable(Exception):
    """A compiled module that cannot be used; the message is a clause that says why."""


def _find(name):
    packages = filter(importlib.util.find_spec, _PACKAGES)
    specs = (importlib.util.find_spec(f"{package}.{name}") for package in packages)
    return next(filter(None, specs), None)


def module_path(name):
    """Return the file of the module `name`, such as `"_cpu"`; None if there is no file
    for this Python.
    """
    spec = _find(name)
    return None if spec is None else spec.origin


def _load_module(name):
    """Import the module `name`.

    Raises:
        Unavailable: the module is not there, of another version, or refused by the
            system's loader.
    """
    spec = _find(name)
    if spec is None:
        raise Unavailable(_why_missing(name))
    try:
        if spec.parent != _PACKAGE:
            _check_version(spec.parent)
        return importlib.import_module(spec.name)
    except (ImportError, OSError, SystemError) as error:
        raise Unavailable(f"does not load: {error}") from error


def _check_version(package):
    version, expected = map(importlib.metadata.version, (package, _PACKAGE))
    if version != expected:
        install = f'pip install "jaxfp8[{package.removeprefix("jaxfp8_")}]=={expected}"'
        raise Unavailable(
            f"is of version {version}, expected that of jaxfp8, {expected}: {install}"
        )


def _why_missing(name):
    built = _build_report().get(name.removeprefix("_"), "")
    if built.startswith("not built: "):
        return built
    # Python imports from the folder that it is started in, where sources hide an
    # installed package.
    if not built and _SOURCES.exists():
        return (
            f"not in {_SOURCES.parent}, which are the sources: run from another "
            "folder, or install jaxfp8"
        )
    report = f" ({built})" if built else ""
    return (
        f"this installation has no file for Python {sys.version.split()[0]}{report}: "
        "install jaxfp8 again"
    )


def _build_report():
    """Return `{module: line of the build}`. An editable install has two folders: the
    sources and the built modules.
    """
    lines = []
    for folder in sys.modules[_PACKAGE].__path__:
        file = Path(folder) / "_modules.txt"
        if file.exists():
            lines += file.read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def _load(platform):
    """Register the custom calls of one platform; return its Library, also where its
    module is missing or does not load.
    """
    name, ops = platform.lower(), tuple(_TARGETS[platform])
    library = Library(name, module_path(f"_{name}"), "", "", ops)
    try:
        module = _load_module(f"_{name}")
        handlers = module.registrations()
        targets = list(map(target_name, ops))
        # A module of an older build lacks a target, or has it under another version.
        # Its contract differs, so nothing of this module may be called.
        lacking = ", ".join(target for target in targets if target not in handlers)
        if lacking:
            raise Unavailable(
                f"does not load: built from other sources, without {lacking}"
            )
    except Unavailable as error:
        # An installation for CPUs has no CUDA module, which is no news. A file that
        # cannot be used is a fault.
        if library.path:
            _log.warning("jaxfp8: ignoring %s, which %s", library.path, error)
        return library._replace(error=str(error))
    # Targets are registered all together or not at all, so that no program meets half
    # of a library.
    for target in targets:
        jax.ffi.register_ffi_target(target, handlers[target], platform=platform)
    _modules[name] = module
    built_for = module.instruction_set() if name == "cpu" else module.architectures()
    return library._replace(built_for=built_for)


LIBRARIES = tuple(map(_load, _TARGETS))

# Where there is a file for CPUs, `_load` has already said why it is not in use.
if not (_modules or LIBRARIES[0].path):
    _log.warning(
        "jaxfp8: running on the slower jnp reference, without compiled kernels: %s",
        LIBRARIES[0].error,
    )


def cuda_architectures():
    """Return the GPU architectures that the CUDA module has code for, such as
    `"sm_90a"`; empty if it is not loaded.
    """
    return LIBRARIES[1].built_for.split()


def has_cuda_kernels() -> bool:
    """Tell whether the CUDA module is built and loadable (a GPU need not be
    present).
    """
    return is_loaded("cuda")


def is_loaded(platform):
    """Tell whether the module of `"cpu"` or `"cuda"` is in use; no other platform has
    one.
    """
    return platform in _modules


def call(op, results, *operands, aliases=None, **attributes):
    """Make one custom call.

    Args:
        op: the name of the custom call, without prefix and version.
        results: `(shape, dtype)` of each result.
        *operands: arrays in the canonical form of common/README.md.
        aliases: `{index of an operand: index of a result}` of buffers that are updated
            in place.
        **attributes: Python bools and strings, NumPy scalars or arrays of one
            dimension, whose dtypes handlers check.
    """
    types = list(itertools.starmap(jax.ShapeDtypeStruct, results))
    function = jax.ffi.ffi_call(target_name(op), types, input_output_aliases=aliases)
    return function(*operands, **attributes)


def cublaslt_version():
    """Return the version of cuBLASLt; raise a RuntimeError that says why it cannot be
    opened, or what it lacks.
    """
    return _modules["cuda"].cublaslt_version()
