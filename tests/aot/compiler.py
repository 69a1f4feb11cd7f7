"""The compiler for H200s: JAX's CUDA plugin, in a folder of its own, because JAX on a CPU would complain about it."""

import os
import pathlib
import sys

import another_process

import jaxfp8

PLUGIN = pathlib.Path(sys.prefix) / "aot"


def missing() -> str | None:
    """What there is not, or None where programs can be compiled for H200s."""
    if not (PLUGIN / "jax_plugins").exists():
        return "needs JAX's CUDA plugin (tools/setup.sh installs it with the CUDA toolkit)"
    if not jaxfp8.has_cuda_kernels():
        return "needs the CUDA library: custom calls must be registered to be compiled"
    return None


def run(module: str, *arguments: str) -> str:
    """Runs a module of this folder as a program where `cuda` topologies can be made; returns what it prints."""
    path = f"{PLUGIN}{os.pathsep}{another_process.PATH}"
    environment = {"XLA_FLAGS": None, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return another_process.python("-m", f"aot.{module}", *arguments, **environment).stdout
