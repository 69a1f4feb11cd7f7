"""amax_to_scale: bitwise against the oracle, for every exponent of amax and stored
scale, and whatever is absent.
"""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases


def check(amax, stored, fp8_max=448.0, margin=0.0):
    """Of vectors, jitted: one group of the op for each element."""
    pairs = jax.jit(
        jax.vmap(lambda a, s: ops.amax_to_scale(a, s, fp8_max=fp8_max, margin=margin))
    )
    expected = oracle.scale_pair(amax, stored, np.float32(fp8_max * 2.0**-margin))
    for got, want in zip(pairs(amax, stored), expected, strict=True):
        cases.assert_bitwise(got[:, 0], want, f"margin {margin}")


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
