"""The built CUDA library: it loads without a driver or cuBLAS, registers, and exports what Python calls and no more."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ops import cases

import jaxfp8

# An editable install has several folders.
LIBRARIES = [Path(folder, "_lib", "libjaxfp8_cuda.so") for folder in jaxfp8.__path__]
LIBRARY = next(filter(Path.exists, LIBRARIES), None)
TARGETS = sorted(cases.CUDA_TARGETS.values())
# Another stage of a handler, and C functions (cuda/architectures.cc and gemm_c_api.h).
FUNCTIONS = (
    "scaled_matmul_initialize",
    "architectures",
    "cublaslt",
    "gemm_platform",
    "set_gemm_plan",
    "count_gemm_plans",
    "tune_gemm",
)
EXPORTS = sorted([*TARGETS, *(f"jaxfp8_{function}_v1" for function in FUNCTIONS)])

pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"the CUDA library was not built: no {LIBRARIES[0]}")

# In a process of its own, where JAX has not loaded CUDA, with no CUDA_HOME or LD_LIBRARY_PATH.
LOAD = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    library[name]
"""
REGISTER = """
import jax
for name in sys.argv[2:]:
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(library[name]), platform="CUDA")
"""


def output(tool, *arguments) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool} (binutils)")
    return subprocess.run([tool, *arguments, str(LIBRARY)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("script", [LOAD, LOAD + REGISTER], ids=["load", "register"])
def test_loads_without_a_driver(script):
    command = [sys.executable, "-c", script, str(LIBRARY), *TARGETS]
    done = subprocess.run(command, capture_output=True, text=True, env={"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr


def test_package_loads_it():
    assert jaxfp8.has_cuda_kernels()


def test_exports():
    symbols = re.findall(r"^\S+ (\w) (\S+)$", output("nm", "-D", "--defined-only"), re.MULTILINE)
    assert sorted(symbols) == [("T", name) for name in EXPORTS]


def test_needs_no_cuda_library():
    """cuBLASLt is opened at first use and the runtime is inside, which opens the driver at first use."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d"))
    assert needed and not [name for name in needed if re.search("cublas|cuda|nvidia|python", name)], needed
    undefined = output("nm", "-D", "--undefined-only")
    assert not re.search(r"\b(cuda|cublas|cu[A-Z])\w*", undefined), undefined


def test_has_code_for_every_architecture():
    """The names of the machine-code sections; the PTX is not shipped."""
    text = LIBRARY.read_bytes()
    for architecture in ("sm_89", "sm_90a", "sm_100", "sm_120"):
        assert architecture.encode() in text, f"no {architecture} in {LIBRARY}"
