"""The numbers of the formats as the literature on mixed precision states them, and where it is wrong."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax import lax

import jaxfp8

# bits, exponent, fraction, largest, smallest normal (all three exact), decimal digits that survive
FORMATS = {
    "float32": (32, 8, 23, 3.4028234663852886e38, 2.0**-126, 6),
    "bfloat16": (16, 8, 7, 3.3895313892515355e38, 2.0**-126, 2),
    "float16": (16, 5, 10, 65504.0, 2.0**-14, 3),
    "float8_e4m3fn": (8, 4, 3, 448.0, 2.0**-6, 0),
    "float8_e5m2": (8, 5, 2, 57344.0, 2.0**-14, 0),
}


@pytest.mark.parametrize("name", FORMATS)
def test_table_of_formats(name):
    """By counting bits, and as jnp.finfo has it."""
    bits, exponent, fraction, largest, smallest, digits = FORMATS[name]
    assert 1 + exponent + fraction == bits == 8 * jnp.dtype(name).itemsize
    info = jnp.finfo(name)
    assert (info.nexp, info.nmant) == (exponent, fraction)
    assert (float(info.max), float(info.tiny)) == (largest, smallest)
    assert int(np.log10(2.0**fraction)) == digits
    codes = np.arange(2 ** min(bits, 16)).astype(np.uint16 if bits > 8 else np.uint8)
    if bits < 32:
        with np.errstate(invalid="ignore"):  # signalling NaNs
            values = codes.view(name).astype(np.float64)
        assert values[np.isfinite(values)].max() == largest


def test_rounded_as_people_quote_them():
    assert f"{float(jnp.finfo('float32').max):.1e}" == f"{float(jnp.finfo('bfloat16').max):.1e}" == "3.4e+38"
    assert f"{2.0**-126:.3e}" == "1.175e-38" and f"{2.0**-14:.1e}" == "6.1e-05"
    assert f"{2.0**-149:.1e}" == "1.4e-45", "the smallest subnormal of float32"
    assert float(jnp.finfo("bfloat16").smallest_subnormal) == 2.0**-133, "of bfloat16 it is 9.2e-41, not 1.4e-45"


def test_our_formats():
    """The largest codes of ours are those of the table: 448 forward, 57344 backward."""
    for name in ("float8_e4m3fn", "float8_e5m2"):
        largest = FORMATS[name][3]
        codes, _ = jaxfp8.ops.quantize(np.float32([largest, 1.1 * largest, 1e9]), jnp.float32(1), name)
        assert codes.astype(jnp.float32).tolist() == [largest] * 3
    assert (jaxfp8.HYBRID.max, jaxfp8.E5M2.max) == (448, 57344)


def half(x):
    """In float16 through JAX and through numpy, which must agree."""
    got = jnp.asarray(np.float32(x)).astype(jnp.float16)
    with np.errstate(over="ignore"):
        oracle.assert_bitwise(got, np.float32(x).astype(np.float16), f"float16 of {x}")
    return float(got)


def test_float16_overflow_and_precision():
    assert half(70000) == np.inf and half(65519) == 65504 and half(65520) == np.inf
    assert half(2048.5) == 2048 and half(2049) == 2048 and half(2050) == 2050
    assert half(1e20) == np.inf and float(jnp.bfloat16(1e20)) == pytest.approx(1e20, rel=2.0**-8)


def test_float16_underflow():
    """1e-5, 1e-6 and 1e-7 are often said to become 0. They become subnormals of ever fewer bits; 2.9e-8 is 0."""
    assert half(1e-5) == 168 * 2.0**-24 and half(1e-6) == 17 * 2.0**-24 and half(1e-7) == 2 * 2.0**-24
    assert [abs(half(x) / x - 1) > error for x, error in ((1e-5, 1e-3), (1e-6, 1e-2), (1e-7, 0.19))] == [True] * 3
    assert half(2.0**-25) == 0 and half(2.9e-8) == 0 and half(3e-8) == 2.0**-24
    assert half(1e-38) == 0 and float(ml_dtypes.bfloat16(1e-38)) == pytest.approx(1e-38, rel=2.0**-4)


def test_tf32():
    """f32 with the fraction rounded to ten bits: the range of f32, the precision of float16."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(4096) * 2.0 ** rng.uniform(-120, 120, 4096)).astype(np.float32)
    bits = x.view(np.uint32)
    odd = (bits >> 13) & 1
    tf32 = ((bits + 0xFFF + odd) & ~np.uint32(0x1FFF)).view(np.float32)
    oracle.assert_bitwise(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10), tf32, "tf32")
    assert (np.abs(tf32 / x.astype(np.float64) - 1) <= 2.0**-11).all(), "0.05 % each, 0.1 % for a product of two"
    ordinary = x[(np.abs(x) > 2.0**-14) & (np.abs(x) < 65504)]
    in_tf32 = np.asarray(lax.reduce_precision(ordinary, 8, 10))
    np.testing.assert_array_equal(in_tf32, ordinary.astype(np.float16).astype(np.float32))
    assert lax.reduce_precision(np.float32(1e20), 8, 10) == pytest.approx(1e20, rel=2.0**-11)
