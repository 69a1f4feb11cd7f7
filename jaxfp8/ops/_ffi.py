"""The native libraries: where they are, which custom calls they hold, and how to call one.

The only module that sees compiled code. Importing it registers every custom-call target, so that exported programs and
compile caches load after `import jaxfp8` alone.
"""

import ctypes
import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._plans import DTYPES, Gemm, Plan, Platform

# An editable install has two folders: the sources and what was built.
_LIBRARY_DIRS = [Path(folder) / "_lib" for folder in sys.modules[__package__.split(".")[0]].__path__]
# Beside the sources, where a Python that is started in a checkout imports them from.
_SOURCES = Path(__file__).parents[2] / "CMakeLists.txt"
_ON_BOTH = (
    "amax",
    "amax_to_scale",
    "delayed_scales",
    "dequantize",
    "push_amaxes",
    "quantize",
    "quantize_transpose",
)
_CUDA_ONLY = (
    "block_scaled_matmul",
    "quantize_activation",
    "quantize_blocks_transpose",
    "quantize_norm",
    "ragged_matmul",
    "scaled_matmul",
)
_BY_CUBLASLT = ("block_scaled_matmul", "scaled_matmul")
OPS = (*_ON_BOTH, *_CUDA_ONLY)
_TARGETS = {"cpu": _ON_BOTH, "CUDA": OPS}
# Of contracts that have changed; the others are 1.
_VERSIONS = {
    "quantize": 3,
    "quantize_activation": 2,
    "quantize_blocks_transpose": 2,
    "quantize_norm": 2,
    "quantize_transpose": 3,
    "scaled_matmul": 2,
}
_loaded = {}  # platform -> library
_errors = {}  # platform -> why its library is not loaded


class Library(NamedTuple):
    """A native library of this installation.

    Attributes:
        platform: `"cpu"` or `"cuda"`.
        path: where it is; None where it was not built.
        error: why it is not loaded, a clause; else empty.
        built_for: the CPU's instruction set that is in use, or the GPUs' that it was built for; empty where not known.
        ops: those it has custom calls for.
    """

    platform: str
    path: str | None
    error: str
    built_for: str
    ops: tuple[str, ...]


def target_name(op: str) -> str:
    """Name of the custom call of `op`; the number goes up whenever its handler's contract changes."""
    return f"jaxfp8_{op}_v{_VERSIONS.get(op, 1)}"


def custom_call_targets() -> tuple[str, ...]:
    """The names of all custom calls, for `jax.export.DisabledSafetyCheck.custom_call`."""
    return tuple(map(target_name, OPS))


def _load(platform: str) -> bool:
    """Registers the targets of one platform; False where its library was not built or does not load."""
    path = _find(platform)
    if path is None:
        needed = {"cpu": "a C++17 compiler", "CUDA": "a CUDA 13 toolkit"}[platform]
        _errors[platform] = f"not in this installation: it was built without {needed}"
        if _SOURCES.exists():
            _errors[platform] = (
                f"not in {_SOURCES.parent}, which are the sources: run from another folder, "
                f"or install anew with {needed}"
            )
        return False
    try:
        library = ctypes.CDLL(os.fspath(path))
        handlers = {target_name(op): _handlers(library, platform, op) for op in _TARGETS[platform]}
    except (OSError, AttributeError) as error:
        logging.getLogger("jaxfp8").warning("jaxfp8: ignoring %s: %s", path.name, error)
        _errors[platform] = f"does not load: {error}"
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    _loaded[platform] = library
    return True


def _find(platform: str) -> Path | None:
    """Where the library of a platform is."""
    return next(filter(Path.exists, (folder / f"libjaxfp8_{platform.lower()}.so" for folder in _LIBRARY_DIRS)), None)


def libraries() -> list[Library]:
    """What there is of each native library, and why not more."""
    found = []
    for platform, ops in _TARGETS.items():
        path = _find(platform)
        path = None if path is None else os.fspath(path)
        found.append(Library(platform.lower(), path, _errors.get(platform, ""), _built_for(platform), ops))
    return found


def _built_for(platform: str) -> str:
    """What the loaded library of a platform says about itself."""
    question = {"cpu": "jaxfp8_instruction_set_v1", "CUDA": "jaxfp8_architectures_v1"}[platform]
    function = getattr(_loaded.get(platform), question, None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return function().decode()


def cuda_architectures() -> list[str]:
    """What the loaded CUDA library has code for, such as `"sm_90a"`; empty without one."""
    return _built_for("CUDA").split()


def _handlers(library, platform: str, op: str):
    """What XLA runs; and what it calls before, outside of the graphs it records."""
    execute = jax.ffi.pycapsule(library[target_name(op)])
    if platform != "CUDA" or op not in _BY_CUBLASLT:
        return execute
    initialize = jax.ffi.pycapsule(library[target_name("scaled_matmul_initialize")])
    return {"initialize": initialize, "execute": execute}


has_cpu_kernels = _load("cpu")
_has_cuda_kernels = _load("CUDA")

if not (has_cpu_kernels or _has_cuda_kernels):
    logging.getLogger("jaxfp8").warning(
        "jaxfp8: installed without native kernels (no C++ compiler was found); running on the slower jnp reference."
    )


def has_cuda_kernels() -> bool:
    """True where the CUDA library is built and loadable (a GPU need not be present)."""
    return _has_cuda_kernels


def call(op: str, results, *operands, aliases=None, **attributes):
    """One custom call.

    Args:
        op: name without prefix and version.
        results: `(shape, dtype)` of each result.
        *operands: arrays in the canonical form of common/README.md.
        aliases: operand index -> result index of buffers updated in place.
        **attributes: Python bools and strings, NumPy scalars or arrays of one dimension; handlers see an explicit type.
    """
    return jax.ffi.ffi_call(
        target_name(op),
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in results],
        input_output_aliases=aliases,
    )(*operands, **{k: np.bool_(v) if isinstance(v, bool) else v for k, v in attributes.items()})


# ------------------------------------------------------------------------------------------- cuda/kernels/gemm_c_api.h


class _Gemm(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in Gemm._fields]

    @classmethod
    def of(cls, gemm: Gemm) -> "_Gemm":
        return cls(*(DTYPES.index(value) if isinstance(value, str) else int(value) for value in gemm))


class _Platform(ctypes.Structure):
    _fields_ = [("device_name", ctypes.c_char * 256), ("capability", ctypes.c_int64), ("version", ctypes.c_int64)]


class _Algorithm(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 8)]


class _TunedGemm(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("microseconds", ctypes.c_double),
        ("first_microseconds", ctypes.c_double),
        ("timed", ctypes.c_int64),
    ]


def _call_cuda(function: str, *arguments) -> None:
    """Calls a C function of the CUDA library.

    Raises:
        RuntimeError: with the reason it gives.
    """
    error = ctypes.create_string_buffer(4096)
    _loaded["CUDA"][f"jaxfp8_{function}_v1"](*arguments, error, ctypes.c_int64(len(error)))
    if error.value:
        raise RuntimeError(error.value.decode())


def check_cublaslt() -> None:
    """Raises a RuntimeError that says why where cuBLASLt cannot be opened or lacks something."""
    _call_cuda("cublaslt")


def gemm_platform(device: int) -> Platform:
    """The device with that ordinal, and cuBLASLt."""
    out = _Platform()
    _call_cuda("gemm_platform", ctypes.c_int64(device), ctypes.byref(out))
    return Platform(out.device_name.decode(), out.capability, out.version)


def set_gemm_plan(platform: Platform, gemm: Gemm, algorithm: str) -> None:
    """From now on `gemm` uses `algorithm` on that platform, which need not be this machine's."""
    name, capability, version = platform
    words = _Algorithm(tuple(int(algorithm[i : i + 16], 16) for i in range(0, 128, 16)))
    of = _Platform(name.encode(), capability, version)
    _call_cuda("set_gemm_plan", ctypes.byref(of), ctypes.byref(_Gemm.of(gemm)), ctypes.byref(words))


def count_gemm_plans() -> tuple[int, int]:
    """How many plans products have used so far: measured ones, and cuBLASLt's first."""
    measured, first = ctypes.c_int64(), ctypes.c_int64()
    _call_cuda("count_gemm_plans", ctypes.byref(measured), ctypes.byref(first))
    return measured.value, first.value


def tune_gemm(device: int, gemm: Gemm) -> Plan:
    """Times the algorithms for `gemm` on a device and sets the fastest as its plan."""
    out = _TunedGemm()
    _call_cuda("tune_gemm", ctypes.c_int64(device), ctypes.byref(_Gemm.of(gemm)), ctypes.byref(out))
    algorithm = "".join(f"{word:016x}" for word in out.algorithm.words)
    return Plan(algorithm, out.microseconds, out.first_microseconds)
