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
