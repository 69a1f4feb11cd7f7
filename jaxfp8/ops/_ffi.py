"""The custom calls of the compiled modules `jaxfp8._cpu` and `jaxfp8._cuda`: their names, registration and calls.

The only code that sees these modules. Importing this file registers every custom-call target, so that exported programs
and compile caches load after `import jaxfp8` alone.
"""

import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _modules

# Versions of custom calls, by the platforms that have a handler. A version goes up when the handler's contract changes.
_ON_BOTH = {
    "amax": 1,
    "amax_to_scale": 1,
    "delayed_scales": 2,
    "dequantize": 1,
    "push_amaxes": 2,
    "quantize": 3,
    "quantize_blocks_transpose": 2,
    "quantize_transpose": 3,
    "read_histories": 2,
    "transpose_blocks": 1,
    "write_histories": 2,
}
_CUDA_ONLY = {
    "block_scaled_matmul": 1,
    "quantize_activation": 2,
    "quantize_activation_grad": 1,
    "quantize_norm": 2,
    "ragged_matmul": 1,
    "scaled_matmul": 2,
}
_CPU_ONLY = {"decode_moment": 1, "encode_moment": 1}
OPS = _ON_BOTH | _CUDA_ONLY | _CPU_ONLY
_TARGETS = {"cpu": _ON_BOTH | _CPU_ONLY, "CUDA": _ON_BOTH | _CUDA_ONLY}
_loaded = {}  # platform -> module
_errors = {}  # platform -> why its module is not loaded
_log = logging.getLogger("jaxfp8")


class Library(NamedTuple):
    """A compiled module of this installation.

    Attributes:
        platform: `"cpu"` or `"cuda"`.
        path: the module's file; None where this installation has no such file.
        error: why the module is not loaded, a clause; empty where the module is loaded.
        built_for: the CPU's instruction set in use, or the GPU architectures with code; empty if not loaded.
        ops: the ops that have a custom call on this platform.
    """

    platform: str
    path: str | None
    error: str
    built_for: str
    ops: tuple[str, ...]


def target_name(op: str) -> str:
    """Return the name of the custom call of `op`."""
    return f"jaxfp8_{op}_v{OPS[op]}"


def custom_call_targets() -> tuple[str, ...]:
    """Return the names of all custom calls, for `jax.export.DisabledSafetyCheck.custom_call`."""
    return tuple(map(target_name, OPS))


def _load(platform: str) -> bool:
    """Register the targets of one platform; False where its module is missing or does not load."""
    name = f"_{platform.lower()}"
    try:
        module = _modules.load(name)
        registrations = module.registrations()
        targets = {target: registrations.get(target) for target in map(target_name, _TARGETS[platform])}
        # A module of an older build lacks a target, or has it under another version. Its contract differs, so nothing
        # of this module may be called.
        if lacking := [target for target, handler in targets.items() if handler is None]:
            raise _modules.Unavailable(f"does not load: built from other sources, without {', '.join(lacking)}")
    except _modules.Unavailable as error:
        _errors[platform] = str(error)
        # An installation for CPUs has no CUDA module, which is no news. A file that cannot be used is a fault.
        if path := _modules.path(name):
            _log.warning("jaxfp8: ignoring %s, which %s", path, error)
        return False
    # Targets are registered all together or not at all, so that no program meets half of a library.
    for target, handler in targets.items():
        jax.ffi.register_ffi_target(target, handler, platform=platform)
    _loaded[platform] = module
    return True


def libraries() -> list[Library]:
    """Return a `Library` for each platform, whether or not its module is loaded."""
    rows = []
    for platform, ops in _TARGETS.items():
        path = _modules.path(f"_{platform.lower()}")
        rows.append(Library(platform.lower(), path, _errors.get(platform, ""), _built_for(platform), tuple(ops)))
    return rows


def error(platform: str) -> str:
    """Return why the module of `"cpu"` or `"cuda"` is not loaded, a clause."""
    return next(library.error for library in libraries() if library.platform == platform)


def _built_for(platform: str) -> str:
    module = _loaded.get(platform)
    if module is None:
        return ""
    return module.instruction_set() if platform == "cpu" else module.architectures()


def cuda_architectures() -> list[str]:
    """Return the GPU architectures that the CUDA module has code for, such as `"sm_90a"`; empty if it is not loaded."""
    return _built_for("CUDA").split()


has_cpu_kernels = _load("cpu")
_has_cuda_kernels = _load("CUDA")

# Where there is a file for CPUs, `_load` has already said why it is not in use.
if not (has_cpu_kernels or _has_cuda_kernels or _modules.path("_cpu")):
    _log.warning("jaxfp8: running on the slower jnp reference, without compiled kernels: %s", _errors["cpu"])


def has_cuda_kernels() -> bool:
    """Tell whether the CUDA module is built and loadable (a GPU need not be present)."""
    return _has_cuda_kernels


def call(op: str, results, *operands, aliases=None, **attributes):
    """Make one custom call.

    Args:
        op: the name of the custom call, without prefix and version.
        results: `(shape, dtype)` of each result.
        *operands: arrays in the canonical form of common/README.md.
        aliases: `{index of an operand: index of a result}` of buffers that are updated in place.
        **attributes: Python bools and strings, NumPy scalars or arrays of one dimension, whose dtypes handlers check.
    """
    return jax.ffi.ffi_call(
        target_name(op),
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in results],
        input_output_aliases=aliases,
    )(*operands, **{k: np.bool_(v) if isinstance(v, bool) else v for k, v in attributes.items()})


def cublaslt_version() -> int:
    """Return the version of cuBLASLt; raise a RuntimeError that says why it cannot be opened, or what it lacks."""
    return _loaded["CUDA"].cublaslt_version()
