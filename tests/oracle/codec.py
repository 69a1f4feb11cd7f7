"""The oracle for codes and ops (see `__init__.py`): formats, bits, and what each op
gives.
"""

import dataclasses

import ml_dtypes
import numpy as np

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)
PRECISE = 2.0**-24  # unit roundoff of f32
SCALE_MAX = F32(2.0**126)  # keeps 1 / scale a normal f32
SCALE_MIN = F32(2.0**-126)  # keeps 1 / scale finite


@dataclasses.dataclass(frozen=True)
class Format:
    """An FP8 format: its ml_dtypes dtype, its largest value and its one NaN code."""

    name: str
    dtype: np.dtype
    max: float
    nan_code: int


E4M3 = Format("e4m3", np.dtype(ml_dtypes.float8_e4m3fn), 448.0, 0x7F)
E5M2 = Format("e5m2", np.dtype(ml_dtypes.float8_e5m2), 57344.0, 0x7E)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


def all_codes(fmt: Format) -> np.ndarray:
    """The 256 codes, in order."""
    return np.arange(256, dtype=np.uint8).view(fmt.dtype)


def all_half_codes(dtype) -> np.ndarray:
    """The 65,536 values of a 16-bit float dtype, NaNs and infinities included, in order
    of their bits.
    """
    return np.arange(65536, dtype=np.uint16).view(dtype)


def bits(values) -> np.ndarray:
    """The bytes of an array as unsigned integers: what 'bitwise equal' compares."""
    values = np.asarray(values)
    return (
        np.ascontiguousarray(values)
        .view(f"u{values.dtype.itemsize}")
        .reshape(values.shape)
    )


def assert_bitwise(got, expected, what: str) -> None:
    """Raises AssertionError unless shape, dtype and every byte agree; says where the
    first difference is.
    """
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, (
        f"{what}: shape {got.shape}, expected {expected.shape}"
    )
    assert got.dtype == expected.dtype, (
        f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    )
    different = bits(got) != bits(expected)
    if different.any():
        first = np.unravel_index(np.argmax(different), different.shape)
        raise AssertionError(
            f"{what}: {different.sum()} of {different.size} differ; first at {first}: "
            f"got {got[first]!r} ({bits(got)[first]:#x}), expected "
            f"{expected[first]!r} ({bits(expected)[first]:#x})"
        )


def widen(x, dtype=F32) -> np.ndarray:
    """x as f32 or f64, exactly; signalling NaNs do not warn."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(dtype)


def amax(x) -> np.float32:
    """max |x| as f32; 0 for an empty array; NaN counts as +inf."""
    x = np.asarray(x)
    if x.size == 0:
        return F32(0)
    magnitude = np.abs(widen(x))
    return F32(np.where(np.isnan(magnitude), F32(np.inf), magnitude).max())


def encode(y, fmt: Format) -> np.ndarray:
    """f32 -> codes: nearest even, saturating (infinities too), NaN without sign."""
    y = np.asarray(y)
    if y.dtype != F32:
        raise TypeError(f"encode: y: expected float32, got {y.dtype}")
    with np.errstate(invalid="ignore"):
        codes = np.array(np.clip(y, F32(-fmt.max), F32(fmt.max)).astype(fmt.dtype))
    codes.view(np.uint8)[np.isnan(y)] = fmt.nan_code
    return codes


def quantize(x, scale, fmt: Format) -> tuple[np.ndarray, np.float32]:
    """(codes, amax): one f32 multiplication, one rounding. A non-finite x becomes the
    NaN code.
    """
    wide = widen(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = wide * F32(scale)
    y = np.where(np.isfinite(wide), y, F32(np.nan)).astype(F32)
    return encode(y, fmt), amax(x)


def counts(x, scale, fmt: Format) -> np.ndarray:
    """How many elements have |x * scale| above the largest value, and how many are not
    zero and get the code of zero.

    An infinity is above it, a NaN is not. f32 `[2]`, so at most 2**24 elements.
    """
    wide, zero = widen(x), np.isin(bits(quantize(x, scale, fmt)[0]), (0x00, 0x80))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        saturated = np.abs(wide * F32(scale)) > fmt.max
    return F32([saturated.sum(), (zero & (wide != 0)).sum()])


def quantize_transpose(
    x, scale, fmt: Format
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes, codes transposed, amax) of a matrix."""
    data, top = quantize(x, scale, fmt)
    return data, np.ascontiguousarray(data.T), top


def assert_column_sums(got, x, what: str = "column sums") -> None:
    """Raises AssertionError unless f32 `[n]` are the sums over the rows of x `[m, n]`,
    in any order of additions.

    m - 1 additions in f32, each off by at most 2**-24 of a partial sum, which is at
    most S = sum|x|: the error is at most (m - 1) 2**-24 S to first order (Higham, eq.
    4.4), and 2**-126 an addition where XLA flushes subnormals. The factor 1 + 2**-10
    covers the higher orders for m below 2**13.
    """
    with np.errstate(invalid="ignore"):
        wide = np.asarray(x).astype(np.float64)
        exact, total = wide.sum(axis=0), np.abs(wide).sum(axis=0)
        bound = len(wide) * (PRECISE * total * (1 + 2.0**-10) + 2.0**-126)
        got = np.asarray(got)
        assert got.dtype == F32 and got.shape == exact.shape, (
            f"{what}: {got.dtype}{got.shape}, expected {exact.shape}"
        )
        good = (
            (np.abs(got.astype(np.float64) - exact) <= bound)
            | (got == exact)
            | (np.isnan(got) & np.isnan(exact))
        )
    assert good.all(), (
        f"{what}: {(~good).sum()} of {good.size} out of bound; first at "
        f"{np.argmin(good)}"
    )


def dequantize(codes, scale_inv, dtype) -> np.ndarray:
    """codes * scale_inv in f32, rounded once to `dtype`; every NaN is the quiet
    positive one of `dtype`.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wide = widen(codes) * F32(scale_inv)
        out = np.array(wide.astype(dtype))
    out[np.isnan(wide)] = np.array(np.nan, dtype=dtype)
    return out
