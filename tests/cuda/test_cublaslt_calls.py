"""scaled_matmul's use of cuBLASLt, with a stand-in for it: layouts, scales, plans, errors (fake_cublaslt/)."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import emulated

FAKE = Path(__file__).resolve().parent / "fake_cublaslt"
CHECKS = """products groups plans first_algorithm block_scales block_scale_plans capabilities unaligned_scales
    unaligned_workspace threads capture no_algorithm old_device missing_library old_library no_terms"""


def include_folders() -> list[Path]:
    """Folders that together hold cublasLt.h and cuda_runtime_api.h: wheels, CUDA_HOME, the toolkit of nvcc."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root, "cu13") for root in (spec.submodule_search_locations if spec else [])]
    roots += [Path(os.environ[name]) for name in ("JAXFP8_CUDA_ROOT", "CUDA_HOME") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        roots.append(Path(nvcc).resolve().parents[1])
    return [root / "include" for root in roots if (root / "include").is_dir()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the stand-ins are built: libcublasLt.so.13, an old/ one that lacks a function, and libgemm.so."""
    includes = include_folders()
    if not all(any((i / header).exists() for i in includes) for header in ("cublasLt.h", "cuda_runtime_api.h")):
        pytest.skip("needs the headers of cuBLAS and of the CUDA runtime (pip install 'jaxfp8[toolkit]')")
    if emulated.compiler() is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("fake_cublaslt")
    (folder / "old").mkdir()
    flags = ["-std=c++17", "-fPIC", f"-I{emulated.ROOT}"]
    flags += [word for include in includes for word in ("-isystem", str(include))]
    ours = "-O3 -shared -Wall -Wextra -Werror".split()
    soname = "-Wl,-soname,libcublasLt.so.13"
    kernels = [str(path) for path in sorted((emulated.ROOT / "cuda" / "kernels").glob("*.cc"))]
    for arguments in (
        [*ours, str(FAKE / "cublaslt.cc"), soname, "-o", str(folder / "libcublasLt.so.13")],
        [*ours, str(FAKE / "cublaslt.cc"), soname, "-DWITHOUT_MATMUL", "-o", str(folder / "old" / "libcublasLt.so.13")],
        [*ours, str(FAKE / "entry.cc"), *kernels, "-fvisibility=hidden", "-ldl", "-o", str(folder / "libgemm.so")],
    ):
        done = subprocess.run([emulated.compiler(), *flags, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


def run(folder, check, *arguments):
    command = [sys.executable, str(FAKE / "checks.py"), str(folder), check, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("check", CHECKS.split())
def test_cublaslt_calls(folder, check):
    if check in ("missing_library", "no_terms") and shutil.which("nvidia-smi"):
        pytest.skip("the real cuBLASLt may be found here")
    run(folder, f"calls.{check}")


def test_sizes_of_attributes(folder):
    """The stand-in takes attributes as NVIDIA's library does, which answers that without a GPU."""
    libraries = [include.parent / "lib" / "libcublasLt.so.13" for include in include_folders()]
    library = next(filter(Path.exists, libraries), None)
    if library is None:
        pytest.skip("needs libcublasLt.so.13 beside its header (pip install 'jaxfp8[toolkit]')")
    run(folder, "real.attribute_sizes", str(library))
