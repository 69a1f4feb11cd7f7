"""The compiler for H200s: JAX's CUDA plugin, in a folder of its own, because JAX on a CPU would complain about it."""

import os
import pathlib
import subprocess
import sys

import jaxfp8

PLUGIN = pathlib.Path(sys.prefix) / "aot"
TESTS = pathlib.Path(__file__).parents[1]


def missing() -> str | None:
    """What there is not, or None where programs can be compiled for H200s."""
    if not (PLUGIN / "jax_plugins").exists():
        return "needs JAX's CUDA plugin (tools/setup.sh installs it with the CUDA toolkit)"
    if not jaxfp8.has_cuda_kernels():
        return "needs the CUDA library: custom calls must be registered to be compiled"
    return None


def run(module: str, *arguments: str) -> str:
    """Runs a module of this folder as a program where `cuda` topologies can be made; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(TESTS), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", f"aot.{module}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
