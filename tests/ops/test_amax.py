"""amax: bitwise against the oracle, for every 16-bit value and wherever a NaN may
hide.
"""

import jax
import numpy as np
import oracle
import pytest
from oracle import assert_bitwise

from jaxfp8 import ops

from . import cases
from .conftest import EACH_DTYPE


def check(x, what: str = "amax") -> None:
    assert_bitwise(ops.amax(x), oracle.amax(x), what)


@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_every_half_code_alone(implementation, dtype):
    codes = oracle.all_half_codes(dtype)
    got = jax.vmap(ops.amax)(codes[:, None])
    magnitude = np.abs(oracle.widen(codes))
    assert_bitwise(
        got,
        np.where(np.isnan(magnitude), np.float32(np.inf), magnitude),
        "amax of one value",
    )


def test_f32_bit_patterns_alone(implementation):
    values = oracle.f32_corner_cases(1)
    expected = np.array([oracle.amax(value) for value in values])
    assert_bitwise(jax.vmap(ops.amax)(values[:, None]), expected, "amax of one value")


@EACH_DTYPE
def test_shapes(implementation, dtype):
    for seed, shape in enumerate(cases.SHAPES + cases.EMPTY_SHAPES):
        check(cases.random_values(shape, dtype, seed), f"amax of {shape}")


# XLA:CPU's float max loses NaNs from 4096 elements on, and vector kernels have a body
# and a tail: every size class, and the odd value first, in the middle, last.
@pytest.mark.parametrize(
    "bad", [np.nan, -np.nan, np.inf, -np.inf], ids=["nan", "-nan", "inf", "-inf"]
)
@EACH_DTYPE
def test_one_bad_value_is_seen_wherever_it_stands(implementation, dtype, bad):
    for size in (8, 4095, 4096, 70001):
        for position in (0, size // 2, size - 1):
            x = np.ones(size, dtype)
            x[position] = bad
            got = np.asarray(ops.amax(x))
            assert got == np.inf, f"size {size}, position {position}: {got}"
