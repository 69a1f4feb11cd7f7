"""The kernels of cuda/ as the PTX that nvcc makes of them, run by an interpreter: no
GPU, nothing of the emulator's.

The host code is nvcc's too. Its objects register and launch their kernels through the
stand-in for the CUDA runtime, so grids, blocks and parameters are those of a GPU.
"""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import jax
import pytest

from .. import buffers, emulated

HERE = Path(__file__).resolve().parent
CACHE = emulated.ROOT / "build" / "ptx"
ARCHITECTURE = "90a"
# ragged_tma is Hopper's alone: the emulator does not have its instructions.
KERNELS = (*emulated.KERNELS, "ragged_tma")


@functools.cache
def nvcc() -> str | None:
    """Return nvcc of CUDA 13: NVIDIA's wheel beside Python, else the one on the path;
    None without.
    """
    for path in (
        Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc"),
        shutil.which("nvcc"),
    ):
        if path and Path(path).exists():
            done = subprocess.run([path, "--version"], capture_output=True, text=True)
            if "release 13." in done.stdout:
                return str(path)
    return None


@functools.cache
def toolkit_include() -> Path:
    """Return the folder of cuda_runtime_api.h that belongs to `nvcc`."""
    command = [nvcc(), "--dryrun", "-x", "cu", "-E", os.devnull]
    top = re.search(
        r"TOP=(.*)", subprocess.run(command, capture_output=True, text=True).stderr
    )
    return Path(top[1].strip(), "include")


def why_not() -> str | None:
    """Return the reason why there is no interpreter here, a clause; else None."""
    if emulated.compiler() is None:
        return "needs a C++ compiler with _Float16"
    return (
        None
        if nvcc()
        else "needs nvcc of CUDA 13, which makes the PTX: make cuda installs it"
    )


def compiled(
    architecture: str = ARCHITECTURE, kernels: tuple[str, ...] = KERNELS
) -> Path:
    """Return a folder with `<kernel>.o` and `<kernel>.ptx`, the text that the object
    was made of.
    """
    # No machine code: ptxas would take half of the time, and nothing runs it.
    flags = [
        f"-gencode=arch=compute_{architecture},code=compute_{architecture}",
        "-std=c++17",
        "-O3",
    ]
    flags += [
        f"-I{emulated.ROOT}",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "--keep",
        "--keep-dir=.",
    ]

    def make(folder):
        for kernel in kernels:
            emulated.run(
                [
                    nvcc(),
                    "-c",
                    emulated.ROOT / "cuda" / "kernels" / f"{kernel}.cu",
                    "-o",
                    f"{kernel}.o",
                    *flags,
                ],
                folder,
            )
        for file in folder.iterdir():
            if file.suffix not in (".o", ".ptx"):
                file.unlink()

    version = subprocess.run([nvcc(), "--version"], capture_output=True).stdout
    return emulated.kept(
        CACHE,
        f"sm_{architecture}",
        " ".join((*flags, *kernels)).encode() + version + emulated.sources(),
        make,
    )


def interpreter() -> list[Path]:
    """Return the objects of the interpreter."""
    sources = sorted(HERE.glob("*.cc"))
    flags = [
        "-std=c++20",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    flags += ["-Wno-unknown-pragmas", "-isystem", toolkit_include()]

    def make(folder):
        for source in sources:
            emulated.run(
                [emulated.compiler(), *flags, "-c", source, "-o", f"{source.stem}.o"],
                folder,
            )

    texts = b"".join(
        file.read_bytes() for file in [*sources, *sorted(HERE.glob("*.h"))]
    )
    key = repr(flags).encode() + texts
    folder = emulated.kept(CACHE, "interpreter", key, make)
    return sorted(folder.glob("*.o"))


def _library(name: str, kernels: Path, capability: int, objects) -> ctypes.CDLL:
    """Link the interpreter, the objects of a folder of kernels and more, and load the
    library.
    """
    objects = [*interpreter(), *sorted(kernels.glob("*.o")), *objects]
    # Symbolic: whatever CUDA runtime a process has, these launchers call the stand-in.
    command = [
        emulated.compiler(),
        "-shared",
        "-Wl,-Bsymbolic",
        *objects,
        "-o",
        "lib.so",
    ]
    key = repr(command).encode()
    folder = emulated.kept(CACHE, name, key, functools.partial(emulated.run, command))
    library = ctypes.CDLL(str(folder / "lib.so"))
    library.ptx_unwritten.restype = ctypes.c_int64
    library.ptx_be(capability)
    library.ptx_use_folder(str(kernels).encode())
    return library


@functools.cache
def build(architecture: str = ARCHITECTURE) -> ctypes.CDLL:
    """Compile and load the launchers over the interpreter."""
    capability = int(architecture.rstrip("a")) // 10
    return _library(
        "launchers", compiled(architecture), capability, [emulated.entry_points()]
    )


@functools.cache
def register_handlers(architecture: str) -> ctypes.CDLL:
    """Register the FFI handlers over the interpreter as custom calls
    `ptx_<architecture>_cuda_<op>` of the CPU.
    """
    if reason := why_not():
        pytest.skip(reason)
    include = jax.ffi.include_dir()
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-isystem",
        include,
        "-I",
        emulated.ROOT,
    ]
    source = HERE / "ffi" / "handlers.cc"
    key = (
        repr(flags).encode()
        + source.read_bytes()
        + (emulated.ROOT / "cuda" / "ffi" / "handlers.h").read_bytes()
    )
    command = [emulated.compiler(), *flags, "-c", source, "-o", "handlers.o"]
    compile_handlers = functools.partial(emulated.run, command)
    folder = emulated.kept(CACHE, "handlers", key, compile_handlers)
    capability = int(architecture.rstrip("a")) // 10
    library = _library(
        "handlers",
        compiled(architecture),
        capability,
        [folder / "handlers.o", *emulated.handler_objects(include)],
    )
    emulated.register(f"ptx_{architecture}", library, "ptx_")
    return library


@contextlib.contextmanager
def ops(architecture: str = ARCHITECTURE):
    """Ops on a CPU as on a GPU, over the handlers and the interpreted kernels."""
    with without_faults(architecture), emulated.lowered_to(f"ptx_{architecture}"):
        yield


@contextlib.contextmanager
def without_faults(architecture: str = ARCHITECTURE):
    """The handlers are registered, and have no fault in the end."""
    library = register_handlers(architecture)
    yield
    fault = take_fault(library)
    assert not fault, fault


def launchers(architecture: str = ARCHITECTURE) -> "Interpreted":
    """Return the launchers over the interpreter; skip where it cannot be built."""
    if reason := why_not():
        pytest.skip(reason)
    return Interpreted(build(architecture))


def take_fault(library: ctypes.CDLL) -> str:
    """Return the fault since the last call, with its line of PTX; "" without."""
    text = ctypes.create_string_buffer(1 << 14)
    library.ptx_take_fault(text, len(text))
    return text.value.decode()


def launched(library: ctypes.CDLL, kernel: str) -> int:
    """Return how often kernels with this in their names were launched."""
    with tempfile.NamedTemporaryFile("r") as report:
        library.ptx_report(report.name.encode())
        lines = [line.split() for line in report if kernel in line]
    return sum(int(count) for _, count in lines)


class Interpreted(emulated.Emulated):
    """The launchers over interpreted PTX. Buffers of a call are all the memory that its
    kernels may touch.
    """

    def _launch(self, op, *arguments):
        alive = [buffer for buffer in buffers.alive if buffer.array.nbytes]
        for buffer in alive:
            size = ctypes.c_uint64(buffer.array.nbytes)
            uses = (buffer.is_operand, not buffer.is_operand)
            self.library.ptx_add_buffer(buffer.pointer, size, *map(int, uses))
        try:
            super()._launch(op, *arguments)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{take_fault(self.library)}") from None
        finally:
            for buffer in alive:
                self.library.ptx_remove_buffer(buffer.pointer)
