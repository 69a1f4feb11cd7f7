"""scaled_matmul's use of cuBLASLt, with a stand-in for it: layouts, scales, plans,
errors (fake_cublaslt/).
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import another_process
import pytest

from . import emulated

FAKE = Path(__file__).resolve().parent / "fake_cublaslt"
CHECKS = """products groups plans block_scales capabilities unaligned_scales
    unaligned_workspace threads capture no_algorithm old_device missing_library
    old_library no_terms"""


def include_folders() -> list[Path]:
    """Folders that together hold cublasLt.h and cuda_runtime_api.h: wheels, CUDA_HOME,
    the toolkit of nvcc.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [
        Path(root, "cu13") for root in (spec.submodule_search_locations if spec else [])
    ]
    roots += [
        Path(os.environ[name])
        for name in ("JAXFP8_CUDA_ROOT", "CUDA_HOME")
        if os.environ.get(name)
    ]
    if nvcc := shutil.which("nvcc"):
        roots.append(Path(nvcc).resolve().parents[1])
    return [root / "include" for root in roots if (root / "include").is_dir()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fake_cublaslt"), include_folders(), 13)


@pytest.fixture(scope="module")
def cuda_12(tmp_path_factory):
    """The same of headers that say they are of CUDA 12: it is they that name the
    library.
    """
    folder = tmp_path_factory.mktemp("fake_cublaslt")
    headers = folder / "include"
    headers.mkdir()
    for path in (path for include in include_folders() for path in include.iterdir()):
        if path.name in ("cublas_api.h", "cuda_runtime_api.h"):
            text = re.sub(
                r"(#define (?:CUBLAS_VER_MAJOR|CUDART_VERSION) +)13",
                r"\g<1>12",
                path.read_text(),
            )
            (headers / path.name).write_text(text)
        elif not (headers / path.name).exists():
            (headers / path.name).symlink_to(path)
    return build(folder, [headers], 12)


def build(folder, includes, cuda) -> Path:
    """Build the stand-ins in `folder`: libcublasLt.so.13 or 12, an old/ one without a
    function, and libgemm.so.
    """
    if not all(
        any((i / header).exists() for i in includes)
        for header in ("cublasLt.h", "cuda_runtime_api.h")
    ):
        pytest.skip(
            "needs the headers of cuBLAS and of the CUDA runtime (pip install "
            "'jaxfp8[toolkit]')"
        )
    if emulated.compiler() is None:
        pytest.skip("needs a C++ compiler")
    (folder / "old").mkdir()
    library = f"libcublasLt.so.{cuda}"
    flags = ["-std=c++17", "-fPIC", f"-I{emulated.ROOT}"]
    flags += [word for include in includes for word in ("-isystem", str(include))]
    ours = "-O3 -shared -Wall -Wextra -Werror".split()
    soname = f"-Wl,-soname,{library}"
    kernels = [
        str(path) for path in sorted((emulated.ROOT / "cuda" / "kernels").glob("*.cc"))
    ]
    for arguments in (
        [*ours, str(FAKE / "cublaslt.cc"), soname, "-o", str(folder / library)],
        [
            *ours,
            str(FAKE / "cublaslt.cc"),
            soname,
            "-DWITHOUT_MATMUL",
            "-o",
            str(folder / "old" / library),
        ],
        [
            *ours,
            str(FAKE / "entry.cc"),
            *kernels,
            "-fvisibility=hidden",
            "-ldl",
            "-o",
            str(folder / "libgemm.so"),
        ],
    ):
        done = subprocess.run(
            [emulated.compiler(), *flags, *arguments], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("check", CHECKS.split())
def test_cublaslt_calls(folder, check):
    if check in ("missing_library", "no_terms") and shutil.which("nvidia-smi"):
        pytest.skip("the real cuBLASLt may be found here")
    another_process.python(FAKE / "checks.py", folder, check)


def test_the_library_of_cuda_12(cuda_12):
    """A module opens the cuBLASLt of its headers."""
    another_process.python(FAKE / "checks.py", cuda_12, "library_of_cuda_12")
