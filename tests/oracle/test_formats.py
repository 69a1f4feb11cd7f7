"""The FP8 formats: the oracle against exact arithmetic over the 256 codes, and the
package's constants against both.
"""

import fractions

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


@FORMATS
def test_oracle_saturates_the_finite_and_shows_the_rest(fmt):
    x = F32([fmt.max * 1.0625, 3e38, -3e38, np.inf, -np.inf, np.nan, -np.nan])
    for scale in (1.0, 2.0**126):
        codes, top = oracle.quantize(x, F32(scale), fmt)
        assert_array_equal(codes[:3].astype(F32), F32([fmt.max, fmt.max, -fmt.max]))
        assert_array_equal(codes[3:].view(np.uint8), [fmt.nan_code] * 4)
        assert top == np.inf
    # The negative control: saturation after the cast, as a plain astype would do it, is
    # not the same thing.
    with np.errstate(invalid="ignore"):
        assert not np.isfinite(x[1:2].astype(fmt.dtype).astype(F32)).any()


def test_probes_hit_every_interval_from_both_sides():
    for fmt in oracle.FORMATS.values():
        codes = oracle.bits(oracle.encode(oracle.rounding_probes(fmt), fmt))
        values = oracle.all_codes(fmt).astype(F32)
        counts = np.bincount(codes, minlength=256)
        assert (counts[np.isfinite(values)] >= 3).all(), (
            "each finite code: itself and a neighbour on each side"
        )
        assert (counts[~np.isfinite(values)] == 0).all()


def test_multiply_add_is_rounded_once():
    """Against exact fractions; also where the product lies between two f32 and the sum
    decides.
    """
    rng = np.random.default_rng(0)
    x, y, z = (
        rng.standard_normal((3, 300)) * 2.0 ** rng.integers(-70, 60, (3, 300))
    ).astype(F32)
    # the product is a midpoint of two f32
    x[:100], y[:100] = 1 + 2.0**-12, 1 + 2.0**-12
    z[:100] = np.resize(F32([2.0**-100, -(2.0**-100), 0, 2.0**-140]), 100)
    for got, terms in zip(
        oracle.multiply_add(x, y, z), zip(x, y, z, strict=True), strict=True
    ):
        a, b, c = (fractions.Fraction(float(term)) for term in terms)
        neighbours = [np.nextafter(got, F32(end)) for end in (-np.inf, np.inf)]
        distances = [
            abs(fractions.Fraction(float(value)) - (a * b + c))
            for value in (got, *neighbours)
        ]
        assert distances[0] == min(distances), terms
        if distances.count(distances[0]) > 1:
            assert oracle.bits(got) % 2 == 0, terms


@FORMATS
def test_scale_of_an_amax(fmt):
    """FP8_MAX / a in one f32 rounding (against rationals), its margin, its two
    clamps.
    """
    rng = np.random.default_rng(3)
    for a in F32(2.0 ** rng.uniform(-110, 110, 200)):
        scale = oracle.amax_to_scale(a, fmt)
        wanted = fractions.Fraction(fmt.max) / fractions.Fraction(float(a))
        error = abs(fractions.Fraction(float(scale)) - wanted)
        for neighbour in (
            np.nextafter(scale, F32(0)),
            np.nextafter(scale, F32(np.inf)),
        ):
            assert error <= abs(fractions.Fraction(float(neighbour)) - wanted)
        assert oracle.amax_to_scale(a, fmt, 3) == scale / 8 == F32(fmt.max) / a / 8
    assert oracle.amax_to_scale(F32(1e-45), fmt) == 2.0**126
    assert oracle.amax_to_scale(F32(3e38), fmt, 60) == 2.0**-126


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
