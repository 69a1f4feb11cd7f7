"""The launchers of the CUDA kernels, run on the host by emulator/ and as interpreted
PTX, against the oracle: what tests/ops, which runs over the handlers, does not reach:
buffers off alignment and between guards.
"""

import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from ops.cases import random_values
from oracle import (
    assert_bitwise,
)

E4M3, E5M2, BF16, F32 = oracle.E4M3, oracle.E5M2, oracle.BF16, np.dtype(np.float32)


def each_group(function, x, scale, *rest):
    """The oracle, one group at a time; scale has one element or one for each group."""
    scale = np.broadcast_to(scale, x.shape[:1])
    groups = [function(x[i], scale[i], *rest) for i in range(x.shape[0])]
    return [np.stack(parts) for parts in zip(*groups, strict=True)]


# One group: around a vector (4, 8), a warp's tile (512, 1024), a block's (4096, 8192).
# Several: in vectors and not, and more than a small device's grid.
SIZES = [1, 3, 7, 8, 9, 31, 511, 512, 513, 1023, 1025, 8191, 8192, 8197, 150_000]
GROUPS = [(3, 1000), (3, 1001), (7, 40_000), (700, 5), (5000, 1)]


@pytest.mark.parametrize("groups, size", [*((1, size) for size in SIZES), *GROUPS])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_sizes(kernels, groups, size, dtype):
    x = random_values((groups, size), dtype, size)
    scales = np.float32(2.0 ** np.random.default_rng(1).uniform(-5, 5, groups))
    expected = each_group(oracle.quantize, x, scales, E5M2)
    inverses = 1 / scales
    pairs = zip(expected[0], inverses, strict=True)
    out = np.stack([oracle.dequantize(*pair, dtype) for pair in pairs])
    for shift, data_shift in ((0, 0), (dtype.itemsize, 1), (0, 1)):
        what = f"shift {shift}"
        got = kernels.quantize(x, scales, E5M2, shift, data_shift)
        assert_all_bitwise(got, expected, what)
        assert_bitwise(kernels.amax(x, shift), expected[1], what)
        got = kernels.dequantize(expected[0], inverses, dtype, shift)
        assert_bitwise(got, out, what)


SHAPES = [
    (1, 1, 1),
    (1, 9, 1),
    (1, 128, 128),
    (1, 16, 8),
    (1, 217, 41),
    (1, 130, 264),
    (3, 128, 256),
    (40, 3, 5),
]
SHAPES += [(2, 100, 100), (1, 16, 3000), (1, 3000, 16)]


def assert_tiles(kernels, x, **shifts):
    """Codes in both layouts, amaxes, and sums of the columns of 128 rows each."""
    scales = np.float32(2.0) ** np.arange(len(x), dtype=np.float32)
    expected = each_group(oracle.quantize_transpose, x, scales, E4M3)
    got = kernels.quantize_transpose(x, scales, E4M3, **shifts)
    assert_all_bitwise(got, expected, f"{shifts}")
    *others, parts = kernels.quantize_transpose(x, scales, E4M3, sums=True, **shifts)
    assert_all_bitwise(others, expected, f"with sums, {shifts}")
    for group, part in np.ndindex(parts.shape[:2]):
        rows = x[group, 128 * part : 128 * part + 128]
        oracle.assert_column_sums(parts[group, part], rows)


@pytest.mark.parametrize("g, m, n", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_tiles(kernels, g, m, n, dtype):
    """The tiles of quantize_transpose are those of all ops with both layouts."""
    x = random_values((g, m, n), dtype, m * n)
    for shift, data_t_shift in ((0, 0), (dtype.itemsize, 1), (0, 1)):
        assert_tiles(kernels, x, shift=shift, data_t_shift=data_t_shift)


@pytest.mark.parametrize("g, m, n", SHAPES)
def test_transposed_codes(kernels, g, m, n):
    """All bytes, in vectors and one by one, on either side."""
    data = np.random.default_rng(m).integers(0, 256, (g, m, n), np.uint8)
    for shifts in ((0, 0), (8, 1), (1, 0)):
        got = kernels.transpose_codes(data.view(E5M2.dtype), *shifts)
        np.testing.assert_array_equal(got.view(np.uint8), data.swapaxes(1, 2))
