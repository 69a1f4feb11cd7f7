"""Products whose inverse scales have no normal product: both multiply the sum one after
the other, to the bit.
"""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

F32 = np.float32
# The inverse scales of a and of b: products that flush to zero, are subnormal,
# overflow; and ordinary ones.
SCALES = tuple(
    (F32(a), F32(b))
    for a, b in [
        (1.7e-35, 1.1e-5),
        (1.1e-5, 1.7e-35),
        (2.0**-100, 2.0**-30),
        (2.0**-70, 2.0**-57),
        (1.3e25, 1.7e20),
        (2.0**127, 2.0),
        (0.0123, 1.7e-3),
        (2.0**-126, 2.0),
    ]
)
M, K, N = 5, 8, 6


@pytest.fixture(params=["ffi", "reference"])
def without_cublaslt(request):
    """cuBLASLt multiplies its scales itself: tests/cuda/test_gpu_products.py."""
    with ops.implementation(request.param):
        yield


def codes(*shape, largest, seed):
    """Small integers, so that sums are exact; one is zero, which overflowing scales
    must leave.
    """
    values = np.random.default_rng(seed).integers(-largest, largest + 1, shape)
    values[..., 0, :] = 0
    return values.astype(oracle.E4M3.dtype)


def operands(a_inv, b_inv):
    """Sums that the scales bring back among the normal numbers, where they can."""
    largest = 1 if a_inv > 1 and b_inv > 1 else 16
    return codes(M, K, largest=largest, seed=1), codes(N, K, largest=largest, seed=2)


def assert_same(got, a, b, a_inv, b_inv):
    """Bitwise, but for results below the normal numbers, which may be flushed."""
    expected = oracle.rescaled(sums_of(a, b), a_inv, b_inv)
    np.testing.assert_array_equal(
        *(
            np.where(np.abs(x) < 2.0**-126, F32(0), x)
            for x in (np.asarray(got), expected)
        )
    )
    # the control: something is left
    assert np.abs(expected[expected != 0]).max() >= 2.0**-126


def sums_of(a, b):
    return (a.astype(np.float64) @ b.astype(np.float64).T).astype(F32)


@pytest.mark.usefixtures("without_cublaslt")
@pytest.mark.parametrize("a_inv, b_inv", SCALES)
def test_one_product(a_inv, b_inv):
    a, b = operands(a_inv, b_inv)
    for run in (
        ops.scaled_matmul,
        jax.jit(ops.scaled_matmul, static_argnames="out_dtype"),
    ):
        assert_same(run(a, b, a_inv, b_inv, out_dtype=F32), a, b, a_inv, b_inv)


@pytest.mark.parametrize("kind", ["rows", "contraction"])
@pytest.mark.parametrize("a_inv, b_inv", SCALES)
def test_ragged_product(implementation, kind, a_inv, b_inv):
    a, b = operands(a_inv, b_inv)
    got = ops.ragged_matmul(
        a,
        b[None] if kind == "rows" else b,
        a_inv,
        b_inv,
        np.int32([M if kind == "rows" else K]),
        ragged=kind,
        out_dtype=F32,
    )
    assert_same(got.reshape(M, N), a, b, a_inv, b_inv)


@pytest.mark.usefixtures("without_cublaslt")
def test_each_pair_of_rows():
    """Scales of rows: the choice is made for each element."""
    a_inv, b_inv = (
        np.resize(np.array(x, F32), size)
        for x, size in zip(zip(*SCALES, strict=True), (M, N), strict=True)
    )
    a, b = operands(2.0, 2.0)
    got = ops.block_scaled_matmul(
        a,
        b,
        a_inv[:, None],
        b_inv[:, None],
        a_block=(1, None),
        b_block=(1, None),
        out_dtype=F32,
    )
    assert_same(got, a, b, a_inv[:, None], b_inv[None])


@pytest.mark.usefixtures("without_cublaslt")
def test_terms_are_added_last():
    """A bias is added to the scaled product, which may be flushed before, as in
    `assert_same`.
    """
    a_inv, b_inv = SCALES[0]
    a, b = operands(a_inv, b_inv)
    bias = np.full(N, 2.0**-110, F32)
    got = ops.scaled_matmul(a, b, a_inv, b_inv, bias=bias, out_dtype=F32)
    product = oracle.rescaled(sums_of(a, b), a_inv, b_inv)
    flushed = np.where(np.abs(product) < 2.0**-126, F32(0), product)
    got = np.asarray(got)
    assert np.all((got == product + bias) | (got == flushed + bias))
    assert np.any(got != bias)
