"""The oracle of moments in FP8, on rows with blocks of 128: numpy and ml_dtypes, with
subnormals flushed as on x86.
"""

import numpy as np

from oracle import E4M3, F32, bits

BLOCK = 128
# by `squared`
SPANS = {False: F32([2.0**-9.4, 2.0**-18.8]), True: F32([2.0**-7.4, 2.0**-14.8])}


def flushed(x):
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def product(x, y):
    """Rounded once; zero where it is still below the smallest normal number when it is
    rounded to 24 bits.
    """
    exact = np.multiply(flushed(x), flushed(y), dtype=np.float64)  # of 2 x 24 bits
    return np.where(
        np.abs(exact) < 2.0**-126 - 2.0**-151, np.copysign(0, exact), exact
    ).astype(F32)


def blocks(x):
    """`[g, n]` as `[g, ceil(n / 128), 128]`, filled up with zeros."""
    g, n = x.shape
    count = -(-n // BLOCK)
    padded = np.zeros((g, count * BLOCK), x.dtype)
    padded[:, :n] = x
    return padded.reshape(g, count, BLOCK)


def rows(x, n):
    return x.reshape(len(x), x.shape[1] * BLOCK)[:, :n]


def power(u, exponent):
    return np.where(exponent > 0, product(u, u), np.where(exponent < 0, np.sqrt(u), u))


def mix(x):
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def random_bits(keys):
    """Of the elements of blocks: polynomials in their number."""
    i, linear = np.arange(BLOCK, dtype=np.uint64), mix(keys)
    start, linear, square = (
        x[..., None].astype(np.uint64) for x in (keys, linear, mix(linear))
    )
    return ((start + i * linear + (i * i * square) % 2**32) % 2**32).astype(np.uint32)


# of codes without a sign
VALUES = np.arange(127, dtype=np.uint8).view(E4M3.dtype).astype(np.float64)


def probability_of_the_code_above(y, exponent):
    """The code below y and, in units of 2**-20, the probability that keeps the mean of
    x**(1/4) to second order.
    """
    below = np.searchsorted(VALUES, np.asarray(y, np.float64), side="right") - 1
    gap = VALUES[np.minimum(below + 1, 126)] - VALUES[below]
    fraction = np.floor((y - VALUES[below]) / np.where(gap > 0, gap, 1) * 2**20).astype(
        np.int64
    )
    product = fraction * ((2**20 - fraction) // 2**9) // 2**11
    factor = np.select([exponent > 0, exponent < 0], [119, 68], 102)
    return below, fraction + product * (15 - below % 8) * factor // 2**15


def is_code_above(u, y, exponent, random):
    """Whether `draw < (u - below) / (above - below)`, so that the mean of what codes
    decode to is u, in f32.
    """
    below = np.searchsorted(VALUES, np.asarray(y, np.float64), side="right") - 1
    low, high = (
        power(
            product(np.append(VALUES, np.nan).astype(F32)[code], F32(1 / 448)),
            -exponent,
        )
        for code in (below, below + 1)
    )
    draw = (random >> 8).astype(F32) * F32(2.0**-24)
    return below, product(draw, high - low) < u - low


def decode(data, amax, exponent):
    """The f32 elements of codes `[g, n]`; amaxes are finite."""
    codes, n = blocks(data), data.shape[1]
    u = product(np.abs(codes.astype(F32)), F32(1 / 448))
    values = product(power(u, -exponent.astype(int)[..., None]), amax[..., None])
    values = np.where(np.isnan(u), F32(np.nan), values)
    return rows(np.where(np.signbit(codes.astype(F32)), -values, values), n)


def encode(data, amax, exponent, after, keys, squared):
    """`(data, amax, exponent)` of `after`, where a block is not what it was; `keys` is
    None or u32, one a block.
    """
    n, old = data.shape[1], blocks(decode(data, amax, exponent))
    same = (bits(old) == bits(blocks(after))).all(-1)
    codes, new_amax, new_exponent = encode_all(after, keys, squared)
    codes = (
        np.where(same[..., None], bits(blocks(data)), bits(blocks(codes)))
        .astype(np.uint8)
        .view(E4M3.dtype)
    )
    amax = np.where(same, bits(amax), bits(new_amax)).view(F32)
    return rows(codes, n), amax, np.where(same, exponent, new_exponent)


def encode_all(x, keys, squared):
    """`(data, amax, exponent)` of x `[g, n]`, all of its blocks."""
    x, n = blocks(x), x.shape[1]
    # 1. The span.
    magnitude = flushed(np.abs(x))
    is_number = (magnitude > 0) & np.isfinite(magnitude)
    top = np.where(is_number, magnitude, 0).max(-1, keepdims=True).astype(F32)
    bottom = np.where(is_number, magnitude, np.inf).min(-1, keepdims=True)
    of_2, of_1 = (bottom >= product(top, span) for span in SPANS[bool(squared)])
    k = np.where(of_2, 1, np.where(of_1, 0, -1))
    # 2. The numbers to round.
    unit = np.where(top > 1, F32(2.0**-32), F32(1))
    inverse = F32(1) / np.maximum(product(top, unit), F32(2.0**-126))
    u = np.minimum(
        product(product(np.where(is_number, magnitude, 0), unit), inverse), F32(1)
    )
    y = product(F32(448), power(u, k))
    # 3. Stochastically, the code below y or the one above.
    if keys is None:
        codes = bits(y.astype(E4M3.dtype))
    else:
        random = random_bits(keys)
        if squared:
            below, probability = probability_of_the_code_above(y, k)
            codes = below + (probability + (random >> 12) >= 2**20)
        else:
            codes = np.add(*is_code_above(u, y, k, random))
    if squared:
        codes = np.maximum(codes, is_number)
    codes = np.where(np.isfinite(x), codes, 0x7F) | np.where(np.signbit(x), 0x80, 0)
    return (
        rows(codes.astype(np.uint8).view(E4M3.dtype), n),
        top[..., 0],
        k[..., 0].astype(np.int8),
    )
