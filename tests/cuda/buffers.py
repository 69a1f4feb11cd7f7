"""Buffers of the emulated launchers: between guard bytes, poisoned, and off alignment
where a test wants it.
"""

import ctypes
import weakref

import numpy as np
import oracle

# The order of jaxfp8::Dtype.
_IN_ORDER = (
    oracle.BF16,
    oracle.F16,
    np.dtype(np.float32),
    oracle.E4M3.dtype,
    oracle.E5M2.dtype,
)
DTYPES = {dtype: i for i, dtype in enumerate(_IN_ORDER)}
_GUARD = 64
_POISON = 0xA5
# All that are in use: the interpreter of PTX lets kernels touch nothing else.
alive = weakref.WeakSet()


class Buffer:
    """`shape` of `dtype` at `shift` bytes off a 256-byte boundary, between guards.

    An operand has values; a result has none.
    """

    def __init__(self, shape, dtype, shift=0, values=None):
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._storage = np.full(size + 2 * _GUARD + 512, _POISON, np.uint8)
        boundary = -(self._storage.ctypes.data + _GUARD) % 256 + _GUARD
        self._first = boundary + shift
        self._last = self._first + size
        self.array = self._storage[self._first : self._last].view(dtype).reshape(shape)
        self.pointer = ctypes.c_void_p(self.array.ctypes.data)
        self.is_operand = values is not None
        if values is not None:
            self.array[...] = values
        alive.add(self)

    def result(self, what: str) -> np.ndarray:
        outside = np.concatenate(
            [self._storage[: self._first], self._storage[self._last :]]
        )
        assert (outside == _POISON).all(), f"{what}: written outside of its buffer"
        return self.array


def operand(x, shift=0) -> Buffer:
    """The buffer of an array."""
    return Buffer(x.shape, x.dtype, shift, x)


class _TileParams(ctypes.Structure):
    """jaxfp8::cuda::TileParams."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "format")),
        *((name, ctypes.c_void_p) for name in ("x", "scale")),
        ("scale_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("data", "data_t", "amax_so_far", "amax")
        ),
        *((name, ctypes.c_int64) for name in ("amax_stride", "groups", "m", "n")),
    ]


class Tiles:
    """The operands and results of an op that quantizes `[g, m, n]` tile by tile.

    Args:
        x: `[g, m, n]`.
        scale, fmt: as for the oracle; one scale, or one for each group.
        transpose: whether data_t is wanted.
        shift: bytes off alignment of x, data and, unless `data_t_shift` is given,
            data_t.
    """

    def __init__(self, x, scale, fmt, *, transpose=True, shift=0, data_t_shift=None):
        g, m, n = x.shape
        scale = np.atleast_1d(np.float32(scale))
        self._x, self._scale = (
            operand(x, shift),
            operand(scale),
        )
        self._data = Buffer((g, m, n), fmt.dtype, shift)
        self._data_t = Buffer(
            (g, n, m), fmt.dtype, shift if data_t_shift is None else data_t_shift
        )
        self._top = Buffer((g,), np.float32)
        self._transpose = transpose
        data_t = self._data_t.pointer if transpose else None
        self.params = _TileParams(
            DTYPES[x.dtype], DTYPES[fmt.dtype], self._x.pointer, self._scale.pointer,
            int(scale.size > 1), self._data.pointer, data_t, ctypes.c_void_p(),
            self._top.pointer, 1, g, m, n,
        )  # fmt: skip

    def results(self):
        """data, data_t and amax; None for those that were not wanted."""
        data_t = self._data_t.result("data_t") if self._transpose else None
        return self._data.result("data"), data_t, self._top.result("amax")
