"""Codes, amaxes, exponents and random bits of moments, to the bit, against the
oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_same_bits
from oracle import moments as oracle_moments

from jaxfp8 import optim

from . import cases, oracle


def updated(kind, x, seed=0, count=0):
    """The state of `quantized_store` after an update in which the moment becomes
    `x`.
    """
    tx = cases.quantized_store(kind, seed=seed)
    state = tx.init(jax.tree.map(jnp.zeros_like, x))._replace(
        update_count=jnp.int32(count)
    )
    return jax.jit(tx.update)(x, state)[1]


@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize("kind", cases.KINDS)
def test_codes_are_those_of_the_oracle(kind, shape):
    """Of two leaves that are equal: their random bits are not."""
    x = cases.moment(kind, shape)
    axis = cases.SHAPES[shape]
    count = 3
    seed = 7
    state = updated(kind, [x, x], seed, count)
    for leaf in range(2):
        keys = oracle.keys(seed, count, leaf, shape, axis)
        data, amax, exponent = oracle.encode(kind, x, axis, keys)
        # The first eighth is zeros before and after: blocks of it keep what `init`
        # wrote, the exponent of zeros.
        assert_same_bits(
            state.inner.moment[leaf], cases.KINDS[kind](data, amax, exponent)
        )
        assert {-1, 0, 1} >= set(np.unique(exponent)) and len(np.unique(exponent)) > 1
        decoded = oracle.decode(data, amax, exponent, axis)
        got = np.asarray(optim.dequantize_state(state).moment[leaf])
        infinite = (kind == "squared") & np.isposinf(x)
        np.testing.assert_array_equal(np.isposinf(got), infinite)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(decoded) & ~infinite)
        assert_same_bits(np.where(np.isfinite(got), got, 0), np.nan_to_num(decoded))


# k, and an element of each block that makes k so.
SMALLEST = {0.5: 2.0**-20, 1: 2.0**-12, 2: 1.0}


@pytest.mark.parametrize("k", SMALLEST)
def test_the_mean_of_a_million_draws(k):
    """Four standard errors, of the probability of the code above and of the mean of the
    fourth root.

    The fourth root keeps its mean to second order in the gap: third-order terms are
    below (1/8)**2 / 8 of the gap, and `(15 - m) / 120` is off by a tenth of
    `1 / (8 + m)`, of a correction below 1 / 4 / 2 / 8 of it: 2**-8 in all.
    """
    shape, y = (8192, 128), 300.0  # between 288 and 320
    x = np.full(shape, (y / 448) ** (1 / k), np.float32)
    x[:, 0], x[:, 1] = 1, SMALLEST[k]  # of amax 1
    codes = np.asarray(updated("squared", x).inner.moment.data)[:, 2:].astype(
        np.float64
    )
    assert set(np.unique(codes)) == {288, 320}
    share = np.mean(codes > 288)
    y = np.float32(448) * (
        x[0, 2] if k == 1 else x[0, 2] * x[0, 2] if k == 2 else np.sqrt(x[0, 2])
    )
    expected = (
        oracle_moments.probability_of_the_code_above(y, np.sign(k - 1))[1] / 2**20
    )
    error = np.sqrt(expected * (1 - expected) / codes.size)
    assert abs(share - expected) < 4 * error
    low, exact, high = (value ** (1 / 4 / k) for value in (288, 300, 320))
    assert abs(low + (high - low) * share - exact) < (4 * error + 2.0**-8) * (
        high - low
    )
    # The shares of rows vary as those of coins do, up to their own error of 1 / sqrt(2
    # rows) = 0.8 %, six times.
    assert np.std((codes > 288).mean(axis=1)) == pytest.approx(
        error * np.sqrt(len(codes)), rel=0.05
    )
