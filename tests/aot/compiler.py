"""The compilers for H200s: JAX's plugins for CUDA 13 and CUDA 12.

Each is in a folder of its own, because JAX on a CPU would complain about it, and takes
one of both only.
"""

import os
import pathlib
import sys

import another_process

import jaxfp8


def _folder(cuda: int) -> pathlib.Path:
    return pathlib.Path(sys.prefix) / f"aot-cuda{cuda}"


def missing(cuda: int = 13) -> str | None:
    """What there is not, or None where programs can be compiled for H200s."""
    if not (_folder(cuda) / "jax_plugins").exists():
        return (
            f"needs JAX's plugin for CUDA {cuda} (tools/setup.sh installs it with the "
            "CUDA toolkit)"
        )
    if not jaxfp8.ops.has_cuda_kernels():
        return "needs the CUDA library: custom calls must be registered to be compiled"
    return None


def run(module: str, *arguments: str, cuda: int = 13) -> str:
    """Runs a module of this folder as a program where `cuda` topologies can be made;
    returns what it prints.
    """
    path = f"{_folder(cuda)}{os.pathsep}{another_process.PATH}"
    environment = {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return another_process.python(
        "-m", f"aot.{module}", *arguments, **environment
    ).stdout
