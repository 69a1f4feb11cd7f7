"""The oracle of moments in FP8: numpy and ml_dtypes, with the formulas of docs/optimizer_states.md."""

import ml_dtypes
import numpy as np

E4M3 = ml_dtypes.float8_e4m3fn
VALUES = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)  # of the codes of numbers that are not negative
SPANS = {"signed": (2.0**-9.4, 2.0**-18.8), "squared": (2.0**-7.4, 2.0**-14.8)}
f32 = np.float32


def blocks_of(x, axis):
    """Elements of `x` in blocks, `[..., blocks, elements]`, with zeros in the last one where 128 does not divide."""
    x = np.moveaxis(x, axis, -1)
    width = min(x.shape[-1], 128)
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)])
    return x.reshape(*x.shape[:-1], -1, width)


def whole(blocks, shape, axis):
    """Undo `blocks_of`."""
    x = blocks.reshape(*blocks.shape[:-2], -1)[..., : shape[axis]]
    return np.moveaxis(x, -1, axis)


def random_bits(seed, step, leaf, shape, axis):
    """The random bits of a moment, in blocks."""

    def mix(x):
        x = np.asarray(x, np.uint64) + 0x9E3779B9 & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    key = mix(mix(mix(seed) ^ np.uint64(step)) ^ np.uint64(leaf))
    sizes = [-(-size // 128) if i == axis else size for i, size in enumerate(shape)]
    block = np.moveaxis(np.arange(np.prod(sizes), dtype=np.uint64).reshape(sizes), axis, -1)
    return mix(mix(mix(key ^ block)[..., None] ^ np.arange(min(shape[axis], 128), dtype=np.uint64)))


def probability_of_the_code_above(y, exponent):
    """Return the code below y and, in units of 2**-20, the probability of the one above."""
    below = np.searchsorted(VALUES, y.astype(np.float64), side="right") - 1
    gap = VALUES[np.minimum(below + 1, 126)] - VALUES[below]
    fraction = np.floor((y - VALUES[below]) / np.where(gap > 0, gap, 1) * 2**20).astype(np.int64)
    product = fraction * ((2**20 - fraction) // 2**9) // 2**11
    factor = np.select([exponent > 0, exponent < 0], [119, 68], 102)
    return below, fraction + product * (15 - below % 8) * factor // 2**15


def encode(kind, x, axis, bits=None):
    """Return `(data, amax, exponent)` of a moment that is f32."""
    blocks = blocks_of(x, axis)
    magnitude = np.abs(blocks)
    is_number = (magnitude > 0) & np.isfinite(magnitude)
    amax = np.max(np.where(is_number, magnitude, 0), -1, keepdims=True)
    amin = np.min(np.where(is_number, magnitude, np.inf), -1, keepdims=True)
    of_2, of_1 = (f32(span) for span in SPANS[kind])
    exponent = np.where(amin >= amax * of_2, 1, np.where(amin >= amax * of_1, 0, -1))
    with np.errstate(invalid="ignore", over="ignore"):
        unit = np.where(amax > 1, f32(2.0**-32), f32(1))
        u = np.minimum(magnitude * unit * (f32(1) / np.maximum(amax * unit, f32(2.0**-126))), f32(1))
        u = np.where(is_number, u, f32(0))
        y = f32(448) * np.where(exponent > 0, u * u, np.where(exponent < 0, np.sqrt(u), u))
    codes = y.astype(E4M3).view(np.uint8)
    if bits is not None:
        below, probability = probability_of_the_code_above(y, exponent)
        codes = (below + (probability + (bits & 0xFFFFF) >= 2**20)).astype(np.uint8)
    if kind == "squared":
        codes = np.maximum(codes, is_number)
    codes = np.where(np.isfinite(blocks), codes, 0x7F) | np.where(np.signbit(blocks), 0x80, 0)
    data = whole(codes.astype(np.uint8), x.shape, axis).view(E4M3)
    return data, *(np.moveaxis(values[..., 0], -1, axis) for values in (amax, exponent.astype(np.int8)))


def decode(data, amax, exponent, axis):
    """Return the f32 elements of a moment."""
    codes = blocks_of(data.astype(np.float32), axis)
    amax, exponent = (np.moveaxis(values, axis, -1)[..., None] for values in (amax, exponent))
    power = np.abs(codes) * f32(1 / 448)
    u = np.where(exponent > 0, np.sqrt(power), np.where(exponent < 0, power * power, power))
    return whole(np.copysign(u * amax, codes), data.shape, axis)
