"""scaled_matmul: within the derived bound of the exact product of the codes; every
shape, dtype and option.
"""

import jax
import numpy as np
import oracle
import pytest
from oracle import BF16, E4M3, E5M2, F32, assert_bitwise

from jaxfp8 import ops

from . import cases
from .conftest import EACH_OUT_DTYPE

# (m, n, k): square, odd, single, tall, wide, long contraction; none a multiple of
# another's tile.
SHAPES = (
    (1, 1, 1),
    (16, 16, 16),
    (17, 33, 49),
    (1, 65, 130),
    (129, 1, 7),
    (5, 3, 1000),
    (64, 48, 32),
    (0, 5, 7),
    (5, 0, 7),
    (5, 7, 0),
)
# Scales of operands whose codes fill the format: products come out near 1, so that no
# dtype over- or underflows.
A_INV, B_INV = F32(0.0123), F32(1.7e-3)


def operands(m, n, k, a_fmt, b_fmt, seed=0):
    return cases.random_codes((m, k), a_fmt, seed), cases.random_codes(
        (n, k), b_fmt, seed + 1
    )


def check(
    implementation, a, b, a_inv, b_inv, *, precise=False, out_dtype=BF16, **terms
):
    got = ops.scaled_matmul(
        a, b, a_inv, b_inv, out_dtype=out_dtype, precise=precise, **terms
    )
    assert got.dtype == out_dtype
    options = cases.accumulation(implementation, precise) | terms
    expected = oracle.scaled_matmul(a, b, a_inv, b_inv, out_dtype=out_dtype, **options)
    expected.check(got, f"{a.shape} x {b.shape} {a.dtype} {b.dtype} -> {out_dtype}")
    return got


def test_shapes(implementation):
    """Every shape and output dtype, as one program. test_ragged_matmul.py has every
    pair of formats.
    """
    b_inv = F32(B_INV / 64)
    shapes = SHAPES + (
        ((256, 512, 1024), (1000, 520, 300)) if implementation == "cuda" else ()
    )
    pairs = [
        operands(m, n, k, E4M3, E5M2, seed) for seed, (m, n, k) in enumerate(shapes)
    ]
    rows = [(a, b, dtype) for a, b in pairs for dtype in cases.INPUT_DTYPES]

    @jax.jit
    def products(pairs, a_inv, b_inv):
        return [
            ops.scaled_matmul(a, b, a_inv, b_inv, out_dtype=d)
            for a, b in pairs
            for d in cases.INPUT_DTYPES
        ]

    for (a, b, dtype), got in zip(rows, products(pairs, A_INV, b_inv), strict=True):
        assert got.dtype == dtype
        expected = oracle.scaled_matmul(
            a, b, A_INV, b_inv, out_dtype=dtype, **cases.accumulation(implementation)
        )
        expected.check(got, f"{a.shape} x {b.shape} -> {dtype}")


@pytest.mark.parametrize("precise", [False, True], ids=["fast", "precise"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@EACH_OUT_DTYPE
def test_bias(implementation, precise, with_bias, out_dtype):
    m, n, k = 33, 17, 70
    a, b = operands(m, n, k, E4M3, E5M2)
    terms = {}
    if with_bias:
        terms["bias"] = F32(np.linspace(-9, 5, n)).astype(out_dtype)
    got = check(
        implementation,
        a,
        b,
        A_INV,
        F32(B_INV / 64),
        precise=precise,
        out_dtype=out_dtype,
        **terms,
    )
    # the control: the terms are large enough for their absence to be out of bound
    if terms:
        without = oracle.scaled_matmul(
            a, b, A_INV, F32(B_INV / 64), out_dtype=out_dtype
        )
        with pytest.raises(AssertionError, match="out of bound"):
            without.check(got)


def test_empty_contraction_keeps_bias(implementation):
    a, b = np.zeros((3, 0), E4M3.dtype), np.zeros((4, 0), E4M3.dtype)
    bias = F32([1, -2, 3, 0.5])
    got = ops.scaled_matmul(a, b, A_INV, B_INV, bias=bias, out_dtype=F32)
    assert_bitwise(got, np.tile(bias, (3, 1)), "K = 0")


@EACH_OUT_DTYPE
def test_nan_codes_reach_their_row_and_column_only(implementation, out_dtype):
    """NaN is right where the exact product is NaN alone."""
    a, b = operands(20, 18, 40, E4M3, E5M2)
    a[3, 7] = b[11, 0] = np.nan
    check(implementation, a, b, A_INV, F32(B_INV / 64), out_dtype=out_dtype)
