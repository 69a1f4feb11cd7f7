"""quantize_blocks_transpose, run on the host by emulator/, against the oracle, bit by bit: the codes of both layouts,
and their scales where cuBLASLt's manual wants them."""

import functools

import numpy as np
import oracle
import oracle_blocks
import pytest

from .emulated import BLOCKS, SCALINGS

FORMATS = tuple(oracle.FORMATS.values())
DTYPES = (oracle.BF16, oracle.F16, np.dtype(np.float32))
DTYPE_IDS = ("bf16", "f16", "f32")
OPTIONS = dict(
    zip(
        SCALINGS,
        ({}, {"power_2_scale": True}, {"scale": "e8m0"}, {"scale": "e8m0", "rounding": "floor"}),
        strict=True,
    )
)
# What the recipes use.
KINDS = {
    "row-wise": ((1, None), "f32"),
    "row-wise, power of two": ((1, None), "f32, power of two"),
    "MX, ceil": ((1, 32), "ceil"),
    "MX, floor": ((1, 32), "floor"),
    "1x128": ((1, 128), "f32"),
    "1x128, power of two": ((1, 128), "f32, power of two"),
    "128x128": ((128, 128), "f32"),
    "128x128, power of two": ((128, 128), "f32, power of two"),
}
ALL_KINDS = pytest.mark.parametrize("block, scaling", KINDS.values(), ids=KINDS)


def expected_of(x, fmt, block, scaling):
    """data, scale_inv, data_t, scale_inv_t of groups."""
    fill = 1 if scaling.startswith("f32") else 0  # the scale of zeros
    groups = []
    for matrix in x:
        parts = []
        for of in (matrix, matrix.T):
            codes, scales = oracle_blocks.quantize(of, fmt, block, **OPTIONS[scaling])
            parts += [codes, oracle_blocks.cublaslt_layout(scales, block, *of.shape, fill)]
        groups.append(parts)
    return [np.stack(parts) for parts in zip(*groups, strict=True)]


def assert_bitwise(got, expected, what):
    names = ("data", "scale_inv", "data_t", "scale_inv_t")
    for value, wanted, name in zip(got, expected, names, strict=False):
        oracle.assert_bitwise(value, wanted, f"{what}: {name}")


def numbers(shape, dtype, seed=0):
    """Of many sizes from one block of 32 to the next, with zeros, an Inf, a NaN, and blocks of zeros."""
    rng = np.random.default_rng(seed)
    g, m, n = shape
    exponents = rng.integers(-20, 12, (g, -(-m // 32), -(-n // 32))).repeat(32, 1).repeat(32, 2)[:, :m, :n]
    x = rng.standard_normal(shape) * 2.0**exponents
    x[exponents == 3] = 0
    x.flat[rng.integers(0, x.size, 2)] = np.inf, np.nan
    return x.astype(np.float32).astype(dtype)


@ALL_KINDS
@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.varied
def test_every_value(emulated_library, dtype, fmt, block, scaling):
    """In blocks of neighbours, most of them finite, and of anything, the other way round."""
    if dtype.itemsize == 2:
        values = oracle.all_half_codes(dtype)
    else:
        values = np.concatenate([oracle.f32_corner_cases(), oracle.rounding_probes(fmt)])
    x = np.resize(values, (1, -(-values.size // 256), 256))
    expected = expected_of(x, fmt, block, scaling)
    for shift in (0, dtype.itemsize):
        got = emulated_library.quantize_blocks_transpose(x, fmt, block, scaling, shift=shift)
        assert_bitwise(got, expected, f"shift {shift}")


@functools.cache
def matrices(shape, dtype, block, scaling):
    """Numbers and what is expected of them, once for all devices."""
    x = numbers(shape, dtype, shape[1] * shape[2])
    return x, expected_of(x, oracle.E4M3, block, scaling)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(
    "g, m, n, dtype",
    [(1, 1, 1, "bf16"), (1, 9, 1, "f32"), (1, 128, 128, "bf16"), (1, 31, 33, "f32"), (1, 130, 264, "bf16"),
     (2, 128, 256, "f32"), (2, 100, 100, "bf16"), (17, 3, 5, "f32"), (1, 16, 500, "f32"), (1, 500, 16, "bf16")],
)  # fmt: skip
@pytest.mark.varied
def test_matrices(kernels, g, m, n, dtype, block, scaling):
    dtype = DTYPES[DTYPE_IDS.index(dtype)]
    x, expected = matrices((g, m, n), dtype, block, scaling)
    for shift, data_t_shift in ((0, 0), (dtype.itemsize, 1), (0, 1)):
        options = {"shift": shift, "data_t_shift": data_t_shift}
        got = kernels.quantize_blocks_transpose(x, oracle.E4M3, block, scaling, **options)
        assert_bitwise(got, expected, f"shift {shift}")
        one = kernels.quantize_blocks_transpose(x, oracle.E4M3, block, scaling, transpose=False, **options)
        assert len(one) == 2
        assert_bitwise(one, expected, f"without data_t, shift {shift}")


@ALL_KINDS
@pytest.mark.varied
def test_launches(emulated_library, block, scaling):
    """One kernel; of whole rows two, after a memset."""
    x = numbers((2, 40, 50), oracle.BF16)
    emulated_library.launches()
    emulated_library.quantize_blocks_transpose(x, oracle.E4M3, block, scaling)
    assert emulated_library.launches() == ((2, 1, 0) if block == (1, None) else (1, 0, 0))
    emulated_library.quantize_blocks_transpose(x[:, :0], oracle.E4M3, block, scaling)
    assert emulated_library.launches() == (0, 0, 0)
