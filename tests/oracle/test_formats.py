"""The FP8 formats: the oracle against exact arithmetic over the 256 codes, and the
package's constants against both.
"""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from parametrize import each_row

import oracle
from oracle import BF16, E4M3, F16, F32

FORMATS = each_row("fmt", oracle.FORMATS)
# (exponent bits, mantissa bits, bias): OCP 8-bit floating point specification, tables 1
# and 2.
LAYOUT = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}


def decode_by_definition(fmt: oracle.Format) -> np.ndarray:
    """The 256 values in f64, from sign, exponent and mantissa as the specification
    writes them.
    """
    exponent_bits, mantissa_bits, bias = LAYOUT[fmt.name]
    values = np.empty(256)
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = code & ((1 << mantissa_bits) - 1)
        if fmt.name == "e4m3" and (code & 0x7F) == 0x7F:
            values[code] = np.nan
        elif fmt.name == "e5m2" and exponent == (1 << exponent_bits) - 1:
            values[code] = np.nan if mantissa else sign * np.inf
        elif exponent == 0:
            values[code] = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            values[code] = (
                sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
            )
    return values


def encode_by_search(y: np.ndarray, fmt: oracle.Format) -> np.ndarray:
    """Codes of f64 `y` by searching the midpoints: exact, because midpoints have at
    most five significant bits.
    """
    values = decode_by_definition(fmt)[:128]
    ladder = values[np.isfinite(values)]
    midpoints = (ladder[:-1] + ladder[1:]) / 2
    magnitude = np.abs(y)
    # the number of midpoints below |y|
    code = np.searchsorted(midpoints, magnitude, side="left")
    tie = np.isin(magnitude, midpoints)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    code = code.astype(np.uint8) | (np.signbit(y).astype(np.uint8) << 7)
    return np.where(np.isnan(y), np.uint8(fmt.nan_code), code).astype(np.uint8)


@FORMATS
def test_oracle_decodes_every_code(fmt):
    got = oracle.all_codes(fmt).astype(np.float64)
    assert_array_equal(got, decode_by_definition(fmt))
    finite = got[np.isfinite(got)]
    assert finite.max() == fmt.max and finite.min() == -fmt.max
    assert np.isnan(got[fmt.nan_code])


@FORMATS
@pytest.mark.parametrize("source", ["bf16", "f16", "probes", "corners"])
def test_oracle_encodes_as_exact_search(fmt, source):
    values = {
        "bf16": lambda: oracle.widen(oracle.all_half_codes(BF16)),
        "f16": lambda: oracle.widen(oracle.all_half_codes(F16)),
        "probes": lambda: oracle.rounding_probes(fmt),
        "corners": lambda: oracle.f32_corner_cases(),
    }[source]()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = encode_by_search(values.astype(np.float64), fmt)
    assert_array_equal(oracle.bits(oracle.encode(values, fmt)), expected)


def test_product_bound_is_tight_enough_to_see_one_code():
    """The bound accepts the f32 product and rejects one in which a single code moved by
    one step.
    """
    rng = np.random.default_rng(5)
    a, b = (
        oracle.encode(rng.standard_normal((9, 64)).astype(F32) * 50, E4M3)
        for _ in range(2)
    )
    product = oracle.scaled_matmul(a, b, 0.25, 0.5, out_dtype=F32)
    got = (a.astype(F32) @ b.astype(F32).T) * F32(0.125)
    product.check(got)
    moved = a.copy()
    moved.view(np.uint8)[3, 5] ^= 1
    wrong = (moved.astype(F32) @ b.astype(F32).T) * F32(0.125)
    with pytest.raises(AssertionError, match="out of bound"):
        product.check(wrong)
    with pytest.raises(AssertionError, match="shape"):
        product.check(got[:1])
    got[2, 2] = np.nan
    with pytest.raises(AssertionError, match="1 of 81"):
        product.check(got)
