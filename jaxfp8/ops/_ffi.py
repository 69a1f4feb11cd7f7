"""The native libraries: where they are, which custom calls they hold, and how to call one.

The only module that sees compiled code. Importing it registers every custom-call target, so that exported programs and
compile caches load after `import jaxfp8` alone.
"""

import ctypes
import logging
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

# An editable install has two folders: the sources and what was built.
_LIBRARY_DIRS = [Path(folder) / "_lib" for folder in sys.modules[__package__.split(".")[0]].__path__]
_ON_BOTH = (
    "amax",
    "amax_to_scale",
    "delayed_scales",
    "dequantize",
    "push_amaxes",
    "quantize",
    "quantize_transpose",
)
_TARGETS = {"cpu": _ON_BOTH, "CUDA": (*_ON_BOTH, "scaled_matmul")}
_VERSIONS = {"quantize": 2, "quantize_transpose": 2}  # of contracts that have changed; the others are 1


def target_name(op: str) -> str:
    """Name of the custom call of `op`; the number goes up whenever its handler's contract changes."""
    return f"jaxfp8_{op}_v{_VERSIONS.get(op, 1)}"


def custom_call_targets() -> tuple[str, ...]:
    """The names of all custom calls, for `jax.export.DisabledSafetyCheck.custom_call`."""
    return tuple(map(target_name, _TARGETS["CUDA"]))


def _load(platform: str) -> bool:
    """Registers the targets of one platform; False where its library was not built or does not load."""
    paths = [folder / f"libjaxfp8_{platform.lower()}.so" for folder in _LIBRARY_DIRS]
    path = next(filter(Path.exists, paths), None)
    if path is None:
        return False
    try:
        library = ctypes.CDLL(os.fspath(path))
        handlers = {target_name(op): library[target_name(op)] for op in _TARGETS[platform]}
    except (OSError, AttributeError) as error:
        logging.getLogger("jaxfp8").warning("jaxfp8: ignoring %s: %s", path.name, error)
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform=platform)
    return True


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
        **attributes: Python bools, NumPy scalars or arrays of one dimension; handlers see an explicit type.
    """
    return jax.ffi.ffi_call(
        target_name(op),
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in results],
        input_output_aliases=aliases,
    )(*operands, **{k: np.bool_(v) if isinstance(v, bool) else v for k, v in attributes.items()})
