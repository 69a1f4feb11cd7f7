"""What the CPU module exports, and what its objects share. `make sanitize` runs the C++
tests, and every handler with good and bad buffers.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

from jaxfp8.ops import _ffi

ROOT = pathlib.Path(__file__).parents[2]
CMAKE = shutil.which(
    "cmake", path=str(pathlib.Path(sys.executable).parent)
) or shutil.which("cmake")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def run(*command):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, (
        f"{command}\n{result.stdout[-4000:]}{result.stderr[-4000:]}"
    )
    return result.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A build folder with the C++ tests."""
    if not (CMAKE and COMPILER):
        pytest.skip("needs cmake and a C++ compiler")
    folder = tmp_path_factory.mktemp("native")
    options = [
        "-DJAXFP8_CUDA=OFF",
        "-DJAXFP8_NATIVE_TESTS=ON",
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    # The programs link no Python, so they are built where there is no Python.h, and no
    # module is.
    run(CMAKE, "-S", ROOT, "-B", folder, *options, "-DPython_INCLUDE_DIR=/none")
    run(CMAKE, "--build", folder, "--parallel", "2")
    return folder


def test_nothing_else_is_exported():
    if not shutil.which("nm") or sys.platform == "darwin":
        pytest.skip("needs nm of GNU binutils")
    module = _ffi.module_path("_cpu") or pytest.skip("the CPU module is not installed")
    lines = run("nm", "-D", "--defined-only", module).splitlines()
    assert [line.split()[-1] for line in lines] == ["PyInit__cpu"]


def test_instruction_sets_share_no_code(build):
    """A function that the linker may take from any object must not come from one
    compiled for a newer processor.
    """
    if not shutil.which("nm") or sys.platform == "darwin":
        pytest.skip("needs nm of GNU binutils")
    for path in build.rglob("blocks_avx*.o"):
        weak = [
            line for line in run("nm", "-C", path).splitlines() if line[17:18] in "WVu"
        ]
        assert not weak, f"{path.name}: {weak}"
