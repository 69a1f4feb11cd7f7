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


@pytest.mark.parametrize("kind", cases.KINDS)
def test_the_error_is_that_of_the_format(kind):
    """A normal code is off by 2**-4 at most, which the root of k divides: |error| <=
    2**-4 / k (1 + 2**-3).

    With 0 <= e <= 2**-4, (1 + e)**(1/k) <= 1 + e / k (1 + e (1/k - 1) / 2), and 1/k -
    1 <= 1; the 1.5 ulp of u and the roundings after it are below 2**-20. Codes may be
    rounded the other way, by twice as much.
    """
    x = np.abs(cases.moment(kind, (64, 256), seed=1))
    x = np.where(np.isfinite(x) & (x < 1e37), x, 0)
    state = updated(kind, x).inner.moment
    got = np.asarray(optim.dequantize_state(optim.QuantizedState(jnp.int32(0), state)))
    normal = (np.asarray(state.data).view(np.uint8) & 0x7F) > 8
    k = np.repeat(2.0 ** np.asarray(state.exponent), 128, axis=1)
    bound = 2 * 2.0**-4 / k * (1 + 2.0**-2)
    error = np.abs(got - x) / np.where(x > 0, x, 1)
    assert np.all(error[normal] <= bound[normal])
    assert np.max(error[normal] * k[normal]) > 2.0**-5  # the bound is not idle


def test_squares_that_are_not_zero_never_become_zero():
    x = np.full((1, 128), 1e-30, np.float32)
    x[0, 0], x[0, 1] = 1e30, 0
    got = np.asarray(optim.dequantize_state(updated("squared", x)).moment)
    assert np.all(got[0, 2:] > 0) and got[0, 1] == 0


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


def test_draws_are_like_coins():
    """Of neighbours, of moments and of steps no draws are correlated, and sums over a
    block have the moments of coins.

    A correlation of n draws has an error of 1 / sqrt(n). A coin's fourth moment is 3 of
    its squared second; a progression, the control, draws a block as a whole where its
    step is small.
    """
    shape = (4096, 128)

    def draws(step, leaf, progression=False):
        keys = oracle.keys(0, step, leaf, shape, 1)
        random = oracle_moments.random_bits(keys)[:, 0]
        if progression:
            random = keys + np.arange(128, dtype=np.uint32) * oracle_moments.mix(keys)
        return np.where(random >> 8 < 0.3 * 2**24, 0.7, -0.3) / np.sqrt(0.21)

    first = draws(5, 1)
    assert abs(first.mean()) < 4 / np.sqrt(first.size)
    pairs = [(first[:, :-i], first[:, i:]) for i in (1, 2, 3, 64)] + [
        (first[1:], first[:-1])
    ]
    for x, y in [*pairs, (first, draws(6, 1)), (first, draws(5, 2))]:
        assert abs(np.mean(x * y)) < 4.5 / np.sqrt(x.size)
    fourth, control = (
        np.mean((x.sum(1) / np.sqrt(128)) ** 4)
        for x in (first, draws(5, 1, progression=True))
    )
    assert 2.7 < fourth < 4 and control > 20


def test_the_mean_step_is_that_of_float32():
    """After 3000 steps the mean of 1 / sqrt(v) is off by less than 0.5 %, and by 1 % or
    more where y keeps its mean.

    Rounding leaves sqrt(v) with a variance of 0.6 to 3 %. Its estimate from 16384
    elements has an error of 0.14 %, of which 0.5 % is more than three.
    """
    shape = (128, 128)
    decay = np.float32(0.999)
    for sigma in (0.0, 2.0):
        scale = jnp.exp(sigma * jax.random.normal(jax.random.key(0), shape))
        tx = cases.quantized_store("squared")

        def step(carry, i, scale=scale, tx=tx):
            state, v = carry
            g = jnp.square(
                scale
                * jax.random.normal(jax.random.fold_in(jax.random.key(1), i), shape)
            )
            ours = decay * optim.dequantize_state(state).moment + (1 - decay) * g
            return (tx.update(ours, state)[1], decay * v + (1 - decay) * g), None

        carry = tx.init(jnp.zeros(shape)), jnp.zeros(shape)
        (state, v), _ = jax.jit(
            lambda carry, step=step: jax.lax.scan(step, carry, jnp.arange(3000))
        )(carry)
        ratio = float(jnp.mean(jnp.sqrt(v / optim.dequantize_state(state).moment)))
        assert abs(ratio - 1) < 0.005


@pytest.mark.parametrize("decay", [0.9, 0.98, 0.99, 0.999])
def test_a_signed_moment_follows_a_gradient_that_turns_round(decay):
    """In blocks of which one element is constant and one small: so k is 1/2 and the
    steps are below half a spacing.

    The mean of 126 elements of 16 blocks has an error of 0.5 % at most, from draws with
    relative errors of up to 23 % that share no bits.
    """
    shape = (16, 128)
    steps = int(8 / (1 - decay))
    tx = cases.quantized_store("signed")
    decay = jnp.float32(decay)

    def step(state, i):
        g = (
            jnp.full(shape, jnp.where(i < steps, 0.9, -0.9), jnp.float32)
            .at[:, 0]
            .set(1)
            .at[:, 1]
            .set(1e-6)
        )
        m = optim.dequantize_state(state).moment
        return tx.update(decay * m + (1 - decay) * g, state)[1], None

    run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(2 * steps))[0])
    moment = np.asarray(optim.dequantize_state(run(tx.init(jnp.zeros(shape)))).moment)
    assert abs(moment[:, 2:].mean() / -0.9 - 1) < 0.02
    assert abs(moment[:, 0].mean() - 1) < 0.02


@pytest.mark.parametrize("decay, largest", [(0.9, 0.10), (0.98, 0.20), (0.99, 0.27)])
def test_the_error_and_the_size_of_a_signed_moment(decay, largest):
    """With noise three times the mean, relative to float32's moment."""
    shape = (64, 128)
    tx = cases.quantized_store("signed")
    decay = jnp.float32(decay)

    def step(carry, i):
        state, exact = carry
        g = mean + 3 * jax.random.normal(
            jax.random.fold_in(jax.random.key(1), i), shape
        )
        after = decay * optim.dequantize_state(state).moment + (1 - decay) * g
        return (tx.update(after, state)[1], decay * exact + (1 - decay) * g), None

    mean = jax.random.normal(jax.random.key(0), shape)
    carry = tx.init(jnp.zeros(shape)), jnp.zeros(shape)
    (state, exact), _ = jax.jit(
        lambda carry: jax.lax.scan(step, carry, jnp.arange(600))
    )(carry)
    moment = optim.dequantize_state(state).moment
    assert np.linalg.norm(moment - exact) < largest * np.linalg.norm(exact)
    assert abs(np.abs(moment).mean() / np.abs(exact).mean() - 1) < 0.02
