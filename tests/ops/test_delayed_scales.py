"""delayed_scales: bitwise against the oracle, for histories of any length and
content.
"""

import functools

import jax
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from oracle import F32

from jaxfp8 import ops

LENGTHS = (1, 2, 3, 16, 31, 255, 256, 257, 1024, 3000)


def history(length, seed):
    """Amaxes of many magnitudes, subnormals included, and every kind of entry that
    counts as none.
    """
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 0x7F800000, length, dtype=np.int32).view(F32)
    absent = rng.choice(F32([0, -0.0, np.inf, np.nan, -np.nan]), length)
    return np.where(rng.random(length) < 0.3, absent, values).astype(F32)


@functools.partial(jax.jit, static_argnames=("fp8_max", "margin", "algo"))
def scales_of(histories, stored, **options):
    return ops.delayed_scales(histories, stored, **options)


def check_scales(histories, stored, fp8_max, margin=0.0, algo="max"):
    got = scales_of(histories, stored, fp8_max=tuple(fp8_max), margin=margin, algo=algo)
    for i, scale in enumerate(got):
        numerator = F32(fp8_max[i] * 2.0**-margin)
        state = histories[i], stored[i], numerator
        pair = oracle.delayed_scale(*state, algo == "most_recent")
        expected = [np.reshape(x, 1) for x in (*pair, F32(0))]
        assert_same_bits(list(scale), expected, f"quantizer {i}")
    assert len(got) == len(histories)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 20, -64])
def test_scales(implementation, algo, margin):
    """Sixteen quantizers at once, each with a length, a format and a stored scale of
    its own.
    """
    for seed in range(4):
        histories = [
            history(length, 100 * seed + i)
            for i, length in enumerate((*LENGTHS, 4, 4, 5, 1, 1, 64))
        ]
        stored = history(16, seed)
        fp8_max = [(448.0, 57344.0)[i % 2] for i in range(16)]
        check_scales(histories, list(stored), fp8_max, margin, algo)
        # One entry below zero, in any slot, and now and then a stored scale.
        for i, values in enumerate(histories):
            values[(7 * seed + i) % len(values)] = (-1, -np.inf, -(2.0**-149), 1)[i % 4]
            stored[i] = -1 if i % 8 == 7 else stored[i]
        check_scales(histories, list(stored), fp8_max, margin, algo)


def test_state_that_is_not_batched_is_not_repeated():
    """A kernel's batch does not make a batch of what all members share."""

    def scales(mine, shared):
        return ops.delayed_scales(
            [mine, shared], [F32(1)] * 2, fp8_max=[448.0, 57344.0]
        )

    batched = jax.make_jaxpr(jax.vmap(scales, in_axes=(0, None), out_axes=(0)))(
        np.ones((5, 4), F32), np.ones(4, F32)
    )
    shapes = [
        [v.aval.shape for v in eqn.outvars]
        for eqn in batched.eqns
        if eqn.primitive.name == "jaxfp8_delayed_scales"
    ]
    assert sorted(map(tuple, shapes)) == [((1,),) * 3, ((5, 1),) * 3]
