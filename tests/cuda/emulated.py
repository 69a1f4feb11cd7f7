"""The kernels of cuda/ compiled for the host (emulator/), and their launchers on numpy
arrays.

Every output lies between guard bytes and is poisoned first, so that a write outside or
a missing write shows. Buffers can be shifted off their alignment. The launchers take
canonical forms: a leading group dimension.
"""

import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from oracle import F32

from .buffers import DTYPES, Buffer, operand

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent / "emulator"
KERNELS = (
    "adam_update", "amax", "amax_to_scale", "delayed_scales", "dequantize",
    "encode_moment", "quantize", "quantize_activation", "quantize_activation_grad",
    "quantize_blocks_transpose", "quantize_norm", "quantize_transpose", "ragged_matmul",
    "read_histories", "transpose_codes", "write_histories",
)  # fmt: skip
FLAGS = (
    "-std=c++17 -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Werror "
    "-Wno-unknown-pragmas"
)
# What is compiled is kept here, named by what it was compiled from: for other workers,
# Pythons and runs.
CACHE = ROOT / "build" / "emulated"


def compiler() -> str | None:
    """A C++ compiler that knows _Float16, or None."""
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            probe = [name, "-x", "c++", "-fsyntax-only", "-"]
            if (
                subprocess.run(
                    probe, input=b"_Float16 x;", capture_output=True
                ).returncode
                == 0
            ):
                return name
    return None


@functools.cache
def _digest(*folders: Path) -> bytes:
    """Of all files but pages."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in sorted(
            file
            for file in folder.rglob("*")
            if file.is_file() and file.suffix != ".md"
        ):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.digest()


def sources() -> bytes:
    """A digest of the files that kernels and launchers are made of."""
    return _digest(ROOT / "common", ROOT / "cuda", EMULATOR)


def run(command, folder: Path) -> None:
    done = subprocess.run(
        [*map(str, command)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def kept(cache: Path, name: str, key: bytes, make) -> Path:
    """The folder in `cache` that `make(folder)` has filled; it is made once for a key,
    by one process.
    """
    folder = cache / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    # Of two workers one compiles, and the other one waits for it.
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as part:
                make(Path(part))
                os.rename(shutil.copytree(part, f"{part}.whole"), folder)
    return folder


def _cached(name: str, *arguments, headers: tuple[Path, ...] = ()) -> Path:
    """What the compiler makes of `arguments`, which include files of ours and of
    `headers`.
    """
    command = [compiler(), *FLAGS.split(), f"-I{EMULATOR}", f"-I{ROOT}"]
    command += [*arguments, "-o", name]
    version = shutil.which(compiler())
    key = repr((version, command)).encode() + sources() + _digest(*headers)
    return kept(CACHE, name, key, functools.partial(run, command)) / name


def _object(source: Path) -> Path:
    return _cached(f"{source.stem}.o", "-O2", "-x", "c++", "-c", source)


def entry_points() -> Path:
    """The object of the launchers as C functions; it has nothing of the emulator."""
    return _object(EMULATOR / "entry.cc")


def _kernels() -> list:
    """Objects of the emulated kernels."""
    files = [
        *sorted(EMULATOR.glob("*.cc")),
        *(ROOT / "cuda" / "kernels" / f"{name}.cu" for name in KERNELS),
    ]
    return [_object(source) for source in files]


def build() -> ctypes.CDLL:
    """Compiles and loads the emulated kernels."""
    return ctypes.CDLL(str(_cached("libemulated.so", "-shared", *_kernels())))


def handler_objects(ffi_include: str) -> list:
    """Objects of the FFI handlers of cuda/, as custom calls that run on the CPU."""
    headers = (Path(ffi_include) / "xla" / "ffi",)
    # Not optimized: a handler runs once a call. XLA's headers are most of what is
    # compiled: once for all handlers.
    options = ["-O0", "-fvisibility=default", "-isystem", ffi_include]
    stream = _cached(
        "stream.h.gch",
        *options,
        "-x",
        "c++-header",
        EMULATOR / "ffi" / "stream.h",
        headers=headers,
    )
    options += ["-include", stream.with_suffix(""), "-c"]
    files = [
        *sorted((EMULATOR / "ffi").glob("*.cc")),
        *sorted((ROOT / "cuda" / "ffi").glob("*.cc")),
    ]
    return [
        _cached(
            f"{file.parent.parent.name}-{file.stem}.o", *options, file, headers=headers
        )
        for file in files
    ]


def build_handlers(ffi_include: str) -> ctypes.CDLL:
    """Compiles and loads the FFI handlers of cuda/ over the emulated kernels."""
    objects = [*handler_objects(ffi_include), *_kernels()]
    return ctypes.CDLL(str(_cached("libemulated_handlers.so", "-shared", *objects)))


@functools.cache
def register_handlers() -> ctypes.CDLL:
    """Register the handlers as custom calls of the CPU, and lower ops to them inside of
    `ops`.
    """
    if compiler() is None:
        pytest.skip("needs a C++ compiler with _Float16 to emulate the CUDA kernels")
    library = build_handlers(jax.ffi.include_dir())
    register("emulated", library, "")
    return library


def register(machine: str, library: ctypes.CDLL, prefix: str) -> None:
    """Register handlers of a library as custom calls `<machine>_cuda_<op>` of the CPU.

    Args:
        machine: the name of the implementation for which ops are lowered to these
            calls.
        prefix: what comes before the name of a handler in the library.
    """
    from jax.interpreters import mlir

    from jaxfp8.ops import _ffi, _primitive

    for op in _ffi._TARGETS["CUDA"]:
        handler = jax.ffi.pycapsule(library[prefix + _ffi.target_name(op)])
        jax.ffi.register_ffi_target(f"{machine}_cuda_{op}", handler, platform="cpu")
    for primitive in _primitive.PRIMITIVES:
        mlir.register_lowering(primitive, _lower, platform="cpu")


def _lower(ctx, *operands, op):
    from jaxfp8.ops import _ffi

    if not (op.implementation or "").startswith(("emulated", "ptx")):
        return op.lower("cpu", ctx, *operands)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_ffi._modules, "cuda", None)
        op = dataclasses.replace(op, implementation=None)
        return op.lower("cuda", ctx, *operands)


@contextlib.contextmanager
def lowered_to(machine: str):
    """Ops on a CPU as on a GPU, over the handlers that were registered for a
    machine.
    """
    from jaxfp8.ops import _ffi, _support

    with pytest.MonkeyPatch.context() as patch, _support.using(machine):
        patch.setattr(_ffi, "target_name", (machine + "_cuda_{}").format)
        yield


@contextlib.contextmanager
def hopper(library: ctypes.CDLL):
    """The emulated GPU is Hopper's inside, with products of warpgroups."""
    library.emulator_be_hopper(1)
    try:
        yield
    finally:
        library.emulator_be_hopper(0)


@contextlib.contextmanager
def ops():
    """Ops on a CPU as on a GPU, over the emulated handlers: one of two multiprocessors,
    so that grids loop, whose threads run in reverse.
    """
    library = register_handlers()
    library.emulator_configure(2, 1)
    try:
        with lowered_to("emulated"):
            yield
    finally:
        library.emulator_configure(132, 0)
    assert library.emulator_take_misaligned() == 0, "misaligned access"


def launches(library: ctypes.CDLL) -> tuple[int, int, int]:
    """What was put on streams since the last call: kernels, memsets, copies."""
    counts = (ctypes.c_int64 * 3)()
    library.emulator_take_launches(counts)
    return tuple(counts)


class Emulated:
    """The launchers. `shift`: bytes off alignment of every buffer but the scales."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        for name in ("transpose_tiles", "ragged_tiles", "emulator_take_misaligned"):
            getattr(library, name).restype = ctypes.c_int64
        self.configure()

    def configure(
        self,
        multiprocessors: int = 132,
        backwards: bool = False,
        error_of_exp2: int = 0,
    ) -> None:
        """How many multiprocessors launchers see, in which order the threads of a block
        run, and whether ex2.approx is too large (1), too small (-1), or one of them for
        each x; rcp.approx is off the other way."""
        self.library.emulator_configure(multiprocessors, int(backwards))
        self.library.emulator_approximate(error_of_exp2)

    def _launch(self, op, *arguments):
        """Buffers, None for one that is not there, dtypes, numbers, and parameters."""

        def passed(argument):
            if argument is None:
                return ctypes.c_void_p()
            if isinstance(argument, Buffer):
                return argument.pointer
            if isinstance(argument, np.dtype):
                argument = DTYPES[argument]
            if isinstance(argument, (int, np.integer)):
                return ctypes.c_int64(argument)
            return ctypes.byref(argument)

        launch = getattr(self.library, f"launch_{op}")
        assert launch(*map(passed, arguments)) == 0, (
            f"{op}: launch failed or blocks hang"
        )
        assert self.library.emulator_take_misaligned() == 0, f"{op}: misaligned access"
        assert self.library.emulator_capture_mode_is_restored(), f"{op}: capture mode"

    def amax(self, x, shift=0):
        top = Buffer(x.shape[:1], F32)
        self._launch("amax", x.dtype, operand(x, shift), top, *x.shape)
        return top.result("amax")

    def quantize(self, x, scale, fmt, shift=0, data_shift=None):
        scale = np.atleast_1d(F32(scale))
        data = Buffer(x.shape, fmt.dtype, shift if data_shift is None else data_shift)
        top = Buffer(x.shape[:1], F32)
        self._launch(
            "quantize", x.dtype, fmt.dtype, operand(x, shift), operand(scale),
            scale.size > 1, data, None, top, *x.shape,
        )  # fmt: skip
        return data.result("data"), top.result("amax")

    def quantize_transpose(
        self, x, scale, fmt, *, shift=0, data_t_shift=None, sums=False
    ):
        """data, data_t, amax and, with `sums`, those of the columns of 128 rows each.

        `data_t_shift`: bytes off alignment of data_t, by default `shift`.
        """
        g, m, n = x.shape
        scale = np.atleast_1d(F32(scale))
        results = [
            Buffer((g, m, n), fmt.dtype, shift),
            Buffer(
                (g, n, m), fmt.dtype, shift if data_t_shift is None else data_t_shift
            ),
            Buffer((g,), F32),
        ]
        if sums:
            results.append(Buffer((g, -(-m // 128), n), F32))
        self._launch(
            "quantize_transpose", x.dtype, fmt.dtype, operand(x, shift), operand(scale),
            scale.size > 1, *results, *[None] * (4 - len(results)), g, m, n,
        )  # fmt: skip
        names = ("data", "data_t", "amax", "column_sums")
        return [
            buffer.result(name) for buffer, name in zip(results, names, strict=False)
        ]

    def transpose_codes(self, data, shift=0, data_t_shift=0):
        g, m, n = data.shape
        data_t = Buffer((g, n, m), data.dtype, data_t_shift)
        self._launch("transpose_codes", operand(data, shift), data_t, g, m, n)
        return data_t.result("data_t")

    def dequantize(self, codes, scale_inv, dtype, shift=0):
        scale_inv = np.atleast_1d(F32(scale_inv))
        out = Buffer(codes.shape, dtype, shift)
        self._launch(
            "dequantize", codes.dtype, np.dtype(dtype), operand(codes, shift),
            operand(scale_inv), scale_inv.size > 1, out, *codes.shape,
        )  # fmt: skip
        return out.result("out")

    def ragged_matmul(
        self,
        a,
        b,
        a_scale,
        b_scale,
        sizes,
        *,
        out_dtype=F32,
        precise=False,
        shift=0,
        tma=False,
    ):
        """a `[v, m, k]`, b `[v, g, n, k]`, sizes `[v, g]`; or a `[v, p, m]`, b
        `[v, n, m]`. Scales of blocks are of as many dimensions as their operand.
        """
        a_scale, b_scale = (np.atleast_1d(F32(scale)) for scale in (a_scale, b_scale))
        contraction, blocks = b.ndim == 3, a_scale.ndim > 1
        if blocks:
            a_scale = np.ascontiguousarray(a_scale.mT)
            b_scale = np.ascontiguousarray(b_scale.mT) if contraction else b_scale
        (members, rows, length), columns, groups = a.shape, b.shape[-2], sizes.shape[1]
        shape = (
            (members, groups, rows, columns)
            if contraction
            else (members, rows, columns)
        )
        out = Buffer(shape, out_dtype, shift * np.dtype(out_dtype).itemsize)
        self._launch(
            "ragged_matmul", a.dtype, b.dtype, np.dtype(out_dtype), operand(a, shift),
            operand(b, shift), operand(a_scale), operand(b_scale), a_scale.size > 1,
            b_scale.size > 1, operand(sizes.astype(np.int32)), out, precise, blocks,
            tma, contraction, members, groups, rows, columns, length,
        )  # fmt: skip
        return out.result("out")

    def _numbers(self, function, count, *arguments):
        out = (ctypes.c_int64 * count)()
        getattr(self.library, function)(*(ctypes.c_int64(a) for a in arguments), out)
        return list(out)

    def stream_plan(self, groups, size, vector, multiprocessors):
        """vectors, tiles, workers, slots, blocks, block_has_one_group."""
        return self._numbers("stream_plan", 6, groups, size, vector, multiprocessors)

    def transpose_tiles(self, groups, m, n):
        return self.library.transpose_tiles(*map(ctypes.c_int64, (groups, m, n)))

    def transpose_tile(self, groups, m, n, index):
        """group, row, column, rows, columns."""
        return self._numbers("transpose_tile", 5, groups, m, n, index)

    def ragged_tiles(self, contraction, members, groups, rows, columns, length):
        return self.library.ragged_tiles(
            *map(ctypes.c_int64, (contraction, members, groups, rows, columns, length))
        )

    def ragged_tile(
        self, sizes, contraction, members, groups, rows, columns, length, index
    ):
        """member, group, row, row_end, column, begin, end; or None."""
        out, sizes = (ctypes.c_int64 * 7)(), np.ascontiguousarray(sizes, np.int32)
        numbers = (
            ctypes.c_int64(n)
            for n in (contraction, members, groups, rows, columns, length, index)
        )
        return (
            list(out)
            if self.library.ragged_tile(
                ctypes.c_void_p(sizes.ctypes.data), *numbers, out
            )
            else None
        )
