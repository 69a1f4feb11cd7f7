"""Codes, amaxes, exponents and random bits of moments, to the bit, against the
oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_same_bits

from jaxfp8 import optim

from . import cases, oracle


def updated(kind, x, seed=0, count=0):
    """The state of `quantized_store` after an update in which the moment becomes
    `x`.
    """
    tx = cases.quantized_store(kind, seed)
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
