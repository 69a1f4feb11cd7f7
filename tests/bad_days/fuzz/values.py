"""Random arrays: any bits, ordinary numbers or hard ones, in shapes that are easy to
get wrong.
"""

import ml_dtypes
import numpy as np
import oracle

HIGH = (np.dtype(np.float32), oracle.BF16, oracle.F16)
FP8 = (oracle.E4M3.dtype, oracle.E5M2.dtype)
DTYPES = (
    *HIGH,
    *FP8,
    *map(
        np.dtype,
        (np.int8, np.uint8, np.int16, np.int32, np.uint32, np.bool_, np.complex64),
    ),
    np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    np.dtype(ml_dtypes.float8_e5m2fnuz),
)
# few, one more or less than a vector's width, and more than a block
SIDES = (0, 1, 2, 3, 7, 16, 17, 33, 64, 127, 128, 257, 1000, 4097)
LARGEST = 2**16  # elements


def dims(rng, count: int, largest: int = LARGEST) -> tuple[int, ...]:
    """`count` sides whose product is at most `largest`."""
    found = []
    for _ in range(count):
        found.append(
            int(rng.choice([side for side in SIDES if side <= max(1, largest)]))
        )
        largest //= max(1, found[-1])
    order = rng.permutation(count)
    return tuple(found[i] for i in order)


def array(rng, shape, dtype) -> np.ndarray:
    """Any bits; or normal numbers of one size; or zeros and ones; or hard f32 numbers,
    cast.
    """
    dtype = np.dtype(dtype)
    size = int(np.prod(shape))
    kind = rng.integers(4)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    with np.errstate(all="ignore"):
        if kind == 0:
            raw = rng.integers(0, 256, (size, dtype.itemsize), dtype=np.uint8)
            return np.ascontiguousarray(raw).view(dtype).reshape(shape)
        if kind == 1:
            values = rng.standard_normal(size) * 2.0 ** rng.integers(-20, 20)
        elif kind == 2:
            values = rng.integers(0, 2, size)
        else:
            values = rng.choice(oracle.f32_corner_cases(), size)
        return np.asarray(values, np.float32).astype(dtype).reshape(shape)


def scales(rng, shape) -> np.ndarray:
    """f32: mostly what recipes give, sometimes what none gives."""
    if rng.random() < 0.8:
        return np.asarray(2.0 ** rng.uniform(-30, 30, shape), np.float32)
    strange = np.float32(
        [0, -0.0, -1, 2.0**126, 2.0**-126, 2.0**-140, np.inf, -np.inf, np.nan]
    )
    return np.asarray(rng.choice(strange, shape), np.float32)


def not_negative(rng, shape) -> np.ndarray:
    """f32: amaxes so far."""
    return rng.choice(
        np.float32([0, 2.0**-149, 1e-3, 1, 448, 1e30, np.inf]), shape
    ).astype(np.float32)
