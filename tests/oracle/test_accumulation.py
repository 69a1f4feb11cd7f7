"""The bounds of products: simulated tensor cores lie inside, products that are wrong do
not. What a GPU may do is a parameter of the model (oracle/accumulation.py).
"""

import functools

import numpy as np
import pytest

import oracle
from oracle import E4M3, F32
from oracle.accumulation import gemm_bound, tensor_core_matmul

M, N = 24, 40

# What a simulated GPU may do, by device and accumulation; "9.0" is Hopper.
GPUS = [
    ("9.0", "fast", {}),
    ("9.0", "fast", {"bits": 14}),
    *(("9.0", "precise", {"promotion": every}) for every in (32, 64, 96, 128)),
    ("8.9", "fast", {"step": 16}),
    ("8.9", "precise", {"step": 16, "promotion": 128}),
    ("10.0", "fast", {"bits": 25, "out_bits": 23}),
    ("12.0", "precise", {"bits": 25, "out_bits": 23}),
]


def quantized(x, fmt=E4M3):
    return oracle.quantize(F32(x), F32(fmt.max / np.abs(x).max()), fmt)[0]


def cancelling(m, n, k):
    """One large product a step, of alternating sign, and others that a tensor core
    drops whole.
    """
    a, b = np.full((m, k), 7.5), np.ones((n, k))
    a[:, ::32] = b[:, ::32] = 256
    a[:, ::64] *= -1
    return a.astype(E4M3.dtype), b.astype(E4M3.dtype)


@functools.cache
def operands(kind, k, m=M, n=N):
    """Codes of random numbers and of hard cases."""
    if kind == "cancelling":
        return cancelling(m, n, k)
    rng = np.random.default_rng(k)
    found = []
    for shape, fmt in zip(((m, k), (n, k)), oracle.FORMATS.values(), strict=True):
        x = rng.standard_normal(shape)
        codes = oracle.all_codes(fmt)
        every = {
            "normal": quantized(x),
            "positive": quantized(np.abs(x)),
            "any code": rng.choice(codes[np.isfinite(codes)], shape),
        }
        found.append(every[kind])
    return found


def exact(a, b):
    return a.astype(np.float64) @ b.astype(np.float64).T


def row(*values):
    """One row of 32 e4m3 codes, zeros after the values."""
    return np.array([[*values, *[0] * (32 - len(values))]], E4M3.dtype)


def test_additions_by_hand():
    # 2**16 is the largest power of two: addends are multiples of 2**3.
    assert tensor_core_matmul(row(256, 15, -7.5), row(256, 1, 1)) == 2.0**16 + 8
    # The subnormal code 2**-9 counts as a multiple of 2**-6, so 7/8 is one of 2**2:
    # addends are multiples of 2**-11.
    assert tensor_core_matmul(row(2.0**-9, 2.0**-9), row(448, 1.125 * 2.0**-4)) == 0.875
    # An accumulator of 2**18 makes them multiples of 2**5: of 225 and 49, 224 and 32
    # are left.
    a = np.concatenate([row(256, 256, 256, 256), row(15, 7)], axis=1)
    assert tensor_core_matmul(a, a) == 2.0**18 + 224 + 32
    assert tensor_core_matmul(a, a, promotion=32) == 2.0**18 + 225 + 49


KINDS = ("normal", "positive", "any code", "cancelling")


@pytest.mark.parametrize("device, accumulation, options", GPUS)
def test_simulated_gpus_are_within_their_bound(device, accumulation, options):
    for kind in KINDS:
        for k in (1, 16, 48, 200, 1024):
            a, b = operands(kind, k)
            error = np.abs(tensor_core_matmul(a, b, **options) - exact(a, b))
            bound = gemm_bound(a, b, accumulation, device)
            assert (error <= bound).all(), (
                f"{kind}, k {k}: {(error / bound).max():.2f} of the bound"
            )


def test_errors_are_those_of_the_docs():
    """docs/numerics.md: the root mean square error of sums of 4096 products, over that
    of the sums.
    """
    modes = {
        "f32": {"bits": 25, "out_bits": 23},
        "precise": {"promotion": 128},
        "fast": {},
    }
    table = {"normal": (2e-7, 1.3e-4, 1.3e-3), "positive": (1.4e-6, 6.5e-4, 7e-2)}
    for kind, row in table.items():
        a, b = operands(kind, 4096)
        for options, expected in zip(modes.values(), row, strict=True):
            error = tensor_core_matmul(a, b, **options) - exact(a, b)
            share = np.sqrt((error**2).mean() / (exact(a, b) ** 2).mean())
            assert expected / 1.3 < share < expected * 1.3, (
                f"{kind}, {options}: {share}"
            )


def test_a_product_that_is_wrong_is_outside():
    """Where one code moved by one step, where a result is NaN, and of another shape."""
    a, b = (quantized(x) for x in np.random.default_rng(5).standard_normal((2, 9, 64)))
    product = oracle.scaled_matmul(a, b, 0.25, 0.5)
    right = F32(exact(a, b) / 8)
    product.check(right)
    moved, not_a_number = a.copy(), right.copy()
    moved.view(np.uint8)[3, 5] ^= 1
    not_a_number[2, 2] = np.nan
    for wrong in (F32(exact(moved, b) / 8), not_a_number, right[:1]):
        with pytest.raises(AssertionError):
            product.check(wrong)
