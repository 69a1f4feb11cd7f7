"""Hard inputs (see `__init__.py`): where rounding can go wrong."""

import numpy as np

from oracle.codec import F32, Format, all_codes, bits


def rounding_probes(fmt: Format) -> np.ndarray:
    """f32 values at which rounding to `fmt` can go wrong, all exact.

    Every finite code, the midpoint of every two neighbours and of the largest value and
    its would-be successor, each with its f32 neighbours on both sides, in both signs;
    zeros.
    """
    finite = all_codes(fmt).astype(np.float64)
    ladder = np.unique(np.abs(finite[np.isfinite(finite)]))
    last_step = ladder[-1] - ladder[-2]
    ladder = np.append(ladder, [ladder[-1] + last_step])
    points = np.concatenate([ladder, (ladder[:-1] + ladder[1:]) / 2]).astype(F32)
    points = np.concatenate(
        [points, np.nextafter(points, F32(0)), np.nextafter(points, F32(np.inf))]
    )
    return np.unique(bits(np.concatenate([points, -points]))).view(F32)


def f32_corner_cases(seed: int = 0) -> np.ndarray:
    """Zeros, subnormals, the smallest and largest numbers, infinities, NaNs of several
    payloads, random bits.
    """
    fixed = [
        0x00000000,
        0x00000001,
        0x00000002,
        0x003FFFFF,
        0x00400000,
        0x007FFFFF,
        0x00800000,
        0x00800001,
    ]
    fixed += [
        0x3F800000,
        0x7F7FFFFF,
        0x7F000000,
        0x7F800000,
        0x7F800001,
        0x7FBFFFFF,
        0x7FC00000,
        0x7FFFFFFF,
    ]
    fixed = np.array(fixed, np.uint32)
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 2**32, 8192, dtype=np.uint32)
    subnormal = rng.integers(0, 2**23, 1024, dtype=np.uint32) | (
        rng.integers(0, 2, 1024, dtype=np.uint32) << 31
    )
    return np.concatenate(
        [fixed, fixed | np.uint32(0x80000000), anything, subnormal]
    ).view(F32)
