"""The built CUDA module: it loads without a driver or cuBLAS, registers, and exports
nothing but its initialization.
"""

import re
import shutil
import subprocess
from pathlib import Path

import another_process
import pytest
from ops import cases

import jaxfp8
from jaxfp8.ops import _ffi

MODULE = _ffi.module_path("_cuda")
# What ptxas said of each kernel; a wheel does not have it.
REPORTS = [
    path
    for folder in jaxfp8.__path__
    for path in sorted(Path(folder, "_ptxas").glob("*.ptxas.txt"))
]
ARCHITECTURES = next(
    library.built_for for library in _ffi.LIBRARIES if library.platform == "cuda"
).split()

pytestmark = pytest.mark.skipif(MODULE is None, reason="the CUDA module was not built")

# In a process of its own, where JAX has not loaded CUDA, with no CUDA_HOME or
# LD_LIBRARY_PATH.
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_cuda", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
targets = module.registrations()
assert sorted(targets) == sys.argv[2:], sorted(targets)
import jax
for name, handler in targets.items():
    jax.ffi.register_ffi_target(name, handler, platform="CUDA")
"""


def output(tool, *arguments) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool} (binutils)")
    return subprocess.run(
        [tool, *arguments, MODULE], capture_output=True, text=True, check=True
    ).stdout


def test_loads_without_a_driver():
    names = sorted(cases.CUDA_TARGETS.values())
    environment = {"CUDA_HOME": None, "LD_LIBRARY_PATH": None, "JAX_PLATFORMS": "cpu"}
    another_process.python("-c", LOAD, MODULE, *names, **environment)


def test_products_of_cublaslt_have_an_initialize_stage():
    targets = _ffi._modules["cuda"].registrations()
    stages = {name for name, handler in targets.items() if isinstance(handler, dict)}
    assert stages == {
        _ffi.target_name(op) for op in ("scaled_matmul", "block_scaled_matmul")
    }
    assert all(list(targets[name]) == ["initialize", "execute"] for name in stages)


def test_exports():
    symbols = re.findall(
        r"^\S+ (\w) (\S+)$", output("nm", "-D", "--defined-only"), re.MULTILINE
    )
    assert symbols == [("T", "PyInit__cuda")]


def test_needs_no_cuda_library():
    """cuBLASLt is opened at first use and the runtime is inside, which opens the driver
    at first use.
    """
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d"))
    assert needed and not [
        name for name in needed if re.search("cublas|cuda|nvidia|python", name)
    ], needed
    undefined = output("nm", "-D", "--undefined-only")
    assert not re.search(r"\b(cuda|cublas|cu[A-Z])\w*", undefined), undefined


def test_has_code_for_its_architectures():
    """The names of the machine-code sections; the PTX is not shipped."""
    data = Path(MODULE).read_bytes()
    assert ARCHITECTURES
    for architecture in ARCHITECTURES:
        assert architecture.encode() in data, f"no {architecture} in {MODULE}"
