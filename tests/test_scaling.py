"""The arithmetic of scales: division to the bit where the platform's own is not, clamps, and what counts as absent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8 import ops, scaling

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["ffi", "reference"])


def amax_to_scale(implementation, amax, stored, fp8_max=448.0, margin=0.0):
    """`(scale, scale_inv)` of vectors, jitted: one group of the op for each element."""
    with ops.implementation(implementation):
        convert = jax.jit(jax.vmap(lambda a, s: ops.amax_to_scale(a, s, fp8_max=fp8_max, margin=margin)))
        return [np.asarray(out)[:, 0] for out in convert(amax, stored)]


def _normal_pairs(rng, n=500_000):
    """Positive floats whose quotient is normal, with equal, neighbouring and power-of-two significands among them."""
    significands = rng.integers(1 << 23, 1 << 24, (2, n)).astype(np.float32)
    x, y = significands * np.float32(2) ** rng.integers(-60, 13, (2, n)).astype(np.float32)
    x[:1000], x[1000:2000], x[2000:3000] = 448, 57344, 1
    y[3000:4000] = 2.0 ** rng.integers(-60, 30, 1000)
    y[4000:5000] = x[4000:5000]
    y[5000:6000] = np.nextafter(x[5000:6000], np.float32(np.inf))
    y[6000:7000] = np.nextafter(x[6000:7000], np.float32(0))
    return x, y


@pytest.mark.parametrize("ulps", [-4, -2, -1, 0, 1, 2, 4])
def test_quotient_is_correctly_rounded_whatever_the_platforms_division(ulps):
    # div.full.f32, which XLA emits on GPUs, is off by at most 2 ulp.
    def inexact(x, y):
        bits = jax.lax.bitcast_convert_type(x / y, jnp.int32) + ulps
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    x, y = _normal_pairs(np.random.default_rng(0))
    got = np.asarray(jax.jit(lambda x, y: scaling.round_quotient(x, y, inexact))(x, y))
    np.testing.assert_array_equal(got, x / y)
    if ulps:  # the division alone is wrong: the test can fail
        assert (np.asarray(inexact(x, y)) != x / y).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
@pytest.mark.parametrize("margin", [0, 1, -3, 8, 0.5])
def test_scale_of_an_amax(implementation, fp8_max, margin):
    rng = np.random.default_rng(1)
    amax = rng.integers(1, 0x7F800000, 100_000, dtype=np.int32).view(np.float32)  # every magnitude, subnormals included
    amax[:4] = np.float32(2.0**-149), np.float32(2.0**-126), np.finfo(np.float32).max, 1
    got, _ = amax_to_scale(implementation, amax, np.ones_like(amax), fp8_max, margin)
    exact = np.float64(np.float32(fp8_max * 2.0**-margin)) / amax.astype(np.float64)
    # One division in f64 and one rounding to f32 is correctly rounded: 53 >= 2 * 24 + 2 bits.
    np.testing.assert_array_equal(got, np.clip(exact, 2.0**-126, 2.0**126).astype(np.float32))


ABSENT = np.array([0, -0.0, -1, np.inf, -np.inf, np.nan], np.float32)


@IMPLEMENTATIONS
def test_absent_amaxes_and_scales(implementation):
    def scale_of(amax, stored):
        return amax_to_scale(implementation, amax, stored)[0]

    np.testing.assert_array_equal(scale_of(ABSENT, np.full(6, 0.25, np.float32)), np.full(6, 4, np.float32))
    np.testing.assert_array_equal(scale_of(ABSENT, ABSENT), np.ones(6, np.float32))
    np.testing.assert_array_equal(scale_of(np.full(6, 448, np.float32), ABSENT), np.ones(6, np.float32))
    np.testing.assert_array_equal(scaling.clean(jnp.asarray(ABSENT)), np.zeros(6, np.float32))


@IMPLEMENTATIONS
def test_a_stored_scale_and_its_inverse_are_normal(implementation):
    stored = np.array([2.0**-149, 1e-38, 1e-30, 1, 1e30, 3e38], np.float32)
    scale, inverse = amax_to_scale(implementation, np.zeros(6, np.float32), stored)
    np.testing.assert_array_equal(scale, 1 / np.clip(stored, np.float32(2.0**-126), np.float32(2.0**126)))
    assert (inverse >= 2.0**-126).all() and (inverse <= 2.0**126).all()


def test_abs_max_counts_nan_before_it_reduces():
    x = np.full(100_000, 1, np.float32)
    x[77] = np.nan
    assert np.isinf(scaling.abs_max(jnp.asarray(x)))
    assert scaling.abs_max(jnp.asarray(x[:77])) == 1
    tiny = jnp.asarray(np.array([2.0**-149, 0], np.float32))
    assert np.asarray(scaling.abs_max(tiny)) == np.float32(2.0**-149)


def test_history_rotates_and_takes_no_infinity():
    history = jnp.zeros(4, jnp.float32)
    for amax, expected in [(1, [1, 0, 0, 0]), (2, [2, 0, 0, 1]), (np.inf, [0, 0, 1, 2]), (4, [4, 1, 2, 0])]:
        history = scaling.push_history(history, jnp.float32(amax))
        np.testing.assert_array_equal(history, np.array(expected, np.float32))


@IMPLEMENTATIONS
def test_the_inverse_is_of_the_rounded_scale(implementation):
    # a / (b / c) as a * c / b rounds differently for about a third of these amaxes.
    amax = np.random.default_rng(2).uniform(1e-3, 1e3, 10_000).astype(np.float32)
    scale = np.float32(448) / amax
    _, got = amax_to_scale(implementation, amax, np.ones_like(amax))
    np.testing.assert_array_equal(got, 1 / scale)
    assert (1 / scale != amax / np.float32(448)).mean() > 0.2
