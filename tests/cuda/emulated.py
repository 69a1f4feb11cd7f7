"""The kernels of cuda/ compiled for the host (emulator/), and their launchers on numpy arrays.

Every output lies between guard bytes and is poisoned first, so that a write outside or a missing write shows. Buffers
can be shifted off their alignment. The launchers take canonical forms: a leading group dimension.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import oracle

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent / "emulator"
KERNELS = ("amax", "amax_to_scale", "delayed_scales", "dequantize", "push_amaxes", "quantize", "quantize_transpose")
FLAGS = "-std=c++17 -O2 -shared -fPIC -fvisibility=hidden -ffp-contract=off -Wall -Wextra -Werror -Wno-unknown-pragmas"

# The order of jaxfp8::Dtype.
_IN_ORDER = (oracle.BF16, oracle.F16, np.dtype(np.float32), oracle.E4M3.dtype, oracle.E5M2.dtype)
_DTYPES = {dtype: i for i, dtype in enumerate(_IN_ORDER)}
_GUARD = 64
_POISON = 0xA5


def compiler() -> str | None:
    """A C++ compiler that knows _Float16, or None."""
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            probe = [name, "-x", "c++", "-fsyntax-only", "-"]
            if subprocess.run(probe, input=b"_Float16 x;", capture_output=True).returncode == 0:
                return name
    return None


def _compile(library: Path, *arguments) -> ctypes.CDLL:
    command = [compiler(), *FLAGS.split(), f"-I{EMULATOR}", f"-I{ROOT}", *map(str, arguments), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def _kernels() -> list:
    return [*sorted(EMULATOR.glob("*.cc")), "-x", "c++", *(ROOT / "cuda" / "kernels" / f"{k}.cu" for k in KERNELS)]


def build(folder: Path) -> ctypes.CDLL:
    """Compiles and loads the emulated kernels."""
    return _compile(folder / "libemulated.so", *_kernels())


def build_handlers(folder: Path, ffi_include: str) -> ctypes.CDLL:
    """Compiles and loads the FFI handlers of cuda/ over the emulated kernels, as custom calls that run on the CPU."""
    handlers = [*sorted((EMULATOR / "ffi").glob("*.cc")), *sorted((ROOT / "cuda" / "ffi").glob("*.cc"))]
    stream = ["-isystem", ffi_include, "-include", EMULATOR / "ffi" / "stream.h"]
    return _compile(folder / "libemulated_handlers.so", *stream, *handlers, *_kernels())


class _Buffer:
    """`shape` of `dtype` at `shift` bytes off a 256-byte boundary, between guards."""

    def __init__(self, shape, dtype, shift=0, values=None):
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._storage = np.full(size + 2 * _GUARD + 512, _POISON, np.uint8)
        boundary = -(self._storage.ctypes.data + _GUARD) % 256 + _GUARD
        self._first = boundary + shift
        self._last = self._first + size
        self.array = self._storage[self._first : self._last].view(dtype).reshape(shape)
        self.pointer = ctypes.c_void_p(self.array.ctypes.data)
        if values is not None:
            self.array[...] = values

    def result(self, what: str) -> np.ndarray:
        outside = np.concatenate([self._storage[: self._first], self._storage[self._last :]])
        assert (outside == _POISON).all(), f"{what}: written outside of its buffer"
        return self.array


class _DelayedScalesQuantizer(ctypes.Structure):
    _POINTERS = ("history", "stored", "next_history", "scale", "scale_inv", "amax")
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("length", ctypes.c_int64),
        ("numerator", ctypes.c_float),
    ]


class _PushAmaxesQuantizer(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("history", "amax", "next_history")), ("length", ctypes.c_int64)]


class Emulated:
    """The launchers. `shift`: bytes off alignment of every buffer but the scales."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library
        library.transpose_tiles.restype = ctypes.c_int64
        library.emulator_take_misaligned.restype = ctypes.c_int64
        self.configure()

    def configure(self, multiprocessors: int = 132, backwards: bool = False) -> None:
        """How many multiprocessors launchers see, and in which order the threads of a block run."""
        self.library.emulator_configure(multiprocessors, int(backwards))

    def _launch(self, op, *arguments):
        arguments = [ctypes.c_int64(a) if isinstance(a, (int, np.integer)) else a for a in arguments]
        assert getattr(self.library, f"launch_{op}")(*arguments) == 0, f"{op}: launch failed or blocks hang"
        assert self.library.emulator_take_misaligned() == 0, f"{op}: misaligned access"

    def amax(self, x, shift=0):
        x_buffer, top = _Buffer(x.shape, x.dtype, shift, x), _Buffer(x.shape[:1], np.float32)
        self._launch("amax", _DTYPES[x.dtype], x_buffer.pointer, top.pointer, *x.shape)
        return top.result("amax")

    def amax_to_scale(self, amax, stored, numerator, shift=0):
        buffers = [_Buffer(amax.shape, np.float32, shift, values) for values in (amax, stored)]
        results = [_Buffer(amax.shape, np.float32, shift) for _ in range(2)]
        amax_pointer, stored_pointer, *result_pointers = (buffer.pointer for buffer in [*buffers, *results])
        numerator = ctypes.c_float(numerator)
        self._launch("amax_to_scale", amax_pointer, stored_pointer, numerator, *result_pointers, amax.size)
        return tuple(buffer.result(name) for buffer, name in zip(results, ("scale", "scale_inv"), strict=True))

    def launches(self):
        """What was put on streams since the last call: (kernels, memsets, copies)."""
        counts = (ctypes.c_int64 * 3)()
        self.library.emulator_take_launches(counts)
        return tuple(counts)

    @staticmethod
    def _amaxes(so_far, groups, in_place):
        """The buffers of the amax so far, 0 where it is None, and of the result."""
        so_far = _Buffer((groups,), np.float32, 0, 0 if so_far is None else so_far)
        return so_far, so_far if in_place else _Buffer((groups,), np.float32)

    def delayed_scales(self, histories, stored, numerators, most_recent=False):
        """`[(history, scale, scale_inv, amax)]` of each quantizer."""
        groups = histories[0].shape[0]
        quantizers, outputs, keep = (_DelayedScalesQuantizer * len(histories))(), [], []
        for i, (history, own) in enumerate(zip(histories, stored, strict=True)):
            inputs = [_Buffer(x.shape, np.float32, 0, x) for x in (history, own)]
            results = [_Buffer(shape, np.float32) for shape in (history.shape, *[own.shape] * 3)]
            pointers = [buffer.pointer for buffer in (*inputs, *results)]
            quantizers[i] = _DelayedScalesQuantizer(*pointers, history.shape[1], numerators[i])
            outputs.append(results)
            keep.append(inputs)
        self._launch("delayed_scales", quantizers, len(histories), groups, int(most_recent))
        names = ("history", "scale", "scale_inv", "amax")
        return [tuple(b.result(name) for b, name in zip(own, names, strict=True)) for own in outputs]

    def push_amaxes(self, histories, amaxes, in_place=True):
        groups = histories[0].shape[0]
        quantizers, outputs, keep = (_PushAmaxesQuantizer * len(histories))(), [], []
        for i, (history, amax) in enumerate(zip(histories, amaxes, strict=True)):
            before, own = (_Buffer(x.shape, np.float32, 0, x) for x in (history, amax))
            after = before if in_place else _Buffer(history.shape, np.float32)
            quantizers[i] = _PushAmaxesQuantizer(before.pointer, own.pointer, after.pointer, history.shape[1])
            outputs.append(after)
            keep += [before, own]
        self._launch("push_amaxes", quantizers, len(histories), groups)
        return [after.result("history") for after in outputs]

    def quantize(self, x, scale, fmt, shift=0, data_shift=None, so_far=None, in_place=True):
        scale = np.atleast_1d(np.float32(scale))
        x_buffer, scale_buffer = _Buffer(x.shape, x.dtype, shift, x), _Buffer(scale.shape, np.float32, 0, scale)
        data = _Buffer(x.shape, fmt.dtype, shift if data_shift is None else data_shift)
        so_far, top = self._amaxes(so_far, x.shape[0], in_place)
        self._launch(
            "quantize", _DTYPES[x.dtype], _DTYPES[fmt.dtype], x_buffer.pointer, scale_buffer.pointer,
            int(scale.size > 1), data.pointer, so_far.pointer, top.pointer, *x.shape,
        )  # fmt: skip
        return data.result("data"), top.result("amax")

    def quantize_transpose(self, x, scale, fmt, shift=0, data_t_shift=None, so_far=None, in_place=True):
        scale = np.atleast_1d(np.float32(scale))
        g, m, n = x.shape
        x_buffer, scale_buffer = _Buffer(x.shape, x.dtype, shift, x), _Buffer(scale.shape, np.float32, 0, scale)
        data = _Buffer(x.shape, fmt.dtype, shift)
        data_t = _Buffer((g, n, m), fmt.dtype, shift if data_t_shift is None else data_t_shift)
        so_far, top = self._amaxes(so_far, g, in_place)
        self._launch(
            "quantize_transpose", _DTYPES[x.dtype], _DTYPES[fmt.dtype], x_buffer.pointer, scale_buffer.pointer,
            int(scale.size > 1), data.pointer, data_t.pointer, so_far.pointer, top.pointer, g, m, n,
        )  # fmt: skip
        return data.result("data"), data_t.result("data_t"), top.result("amax")

    def dequantize(self, codes, scale_inv, dtype, shift=0):
        scale_inv = np.atleast_1d(np.float32(scale_inv))
        data = _Buffer(codes.shape, codes.dtype, shift, codes)
        scale_buffer = _Buffer(scale_inv.shape, np.float32, 0, scale_inv)
        out = _Buffer(codes.shape, dtype, shift)
        self._launch(
            "dequantize", _DTYPES[codes.dtype], _DTYPES[np.dtype(dtype)], data.pointer, scale_buffer.pointer,
            int(scale_inv.size > 1), out.pointer, *codes.shape,
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
