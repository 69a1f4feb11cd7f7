"""amax_to_scale: bitwise against the oracle, for every exponent of amax and stored
scale, and whatever is absent.
"""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

ABSENT = np.array([0, -0.0, np.inf, np.nan, -np.nan, 0], np.float32)


def convert(amax, stored, fp8_max=448.0, margin=0.0):
    """`(scale, scale_inv)` of vectors, jitted: one group of the op for each element."""
    pairs = jax.jit(
        jax.vmap(lambda a, s: ops.amax_to_scale(a, s, fp8_max=fp8_max, margin=margin))
    )
    return [np.asarray(out)[:, 0] for out in pairs(amax, stored)]


def check(amax, stored, fp8_max=448.0, margin=0.0):
    numerator = np.float32(fp8_max * 2.0**-margin)
    expected = oracle.scale_pair(amax, stored, numerator)
    for got, want, name in zip(
        convert(amax, stored, fp8_max, margin),
        expected,
        ("scale", "scale_inv"),
        strict=True,
    ):
        cases.assert_bitwise(got, want, f"{name}, margin {margin}")


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
@pytest.mark.parametrize("margin", [0, 1, -3, 8, 0.5, 64, -64])
def test_every_magnitude(implementation, fp8_max, margin):
    rng = np.random.default_rng(1)
    # subnormals included
    amax, stored = rng.integers(1, 0x7F800000, (2, 100_000), dtype=np.int32).view(
        np.float32
    )
    amax[:4] = np.float32(2.0**-149), np.float32(2.0**-126), np.finfo(np.float32).max, 1
    check(amax, stored, fp8_max, margin)
    check(np.zeros_like(amax), stored, fp8_max, margin)


def test_bit_patterns(implementation):
    values = oracle.f32_corner_cases()
    for shift in (0, 1, 77):
        check(values, np.roll(values, shift))


def test_absent_amaxes_and_scales(implementation):
    np.testing.assert_array_equal(
        convert(ABSENT, np.full(6, 0.25, np.float32))[0], np.full(6, 4, np.float32)
    )
    np.testing.assert_array_equal(convert(ABSENT, ABSENT)[0], np.ones(6, np.float32))
    np.testing.assert_array_equal(
        convert(np.full(6, 448, np.float32), ABSENT)[0], np.ones(6, np.float32)
    )


def test_below_zero(implementation):
    """Only an optimizer's step on the state makes it: no scale, whatever the other
    number is.
    """
    below = np.float32([-1, -np.inf, -(2.0**-149), -1e-38, -3e38, -448])
    for other in (np.full(6, 448, np.float32), ABSENT, below):
        for pair in ((below, other), (other, below)):
            assert all(np.isnan(result).all() for result in convert(*pair))
