"""The CUDA kernels' own source, run on the host by emulator/, against the oracle, bit by bit.

This checks indexing, tails, the reductions, the barriers and every conversion as ptx.h's contract states it. It cannot
check the hardware's side of that contract: test_gpu_ops.py does.
"""

import numpy as np
import oracle
import pytest

FORMATS = tuple(oracle.FORMATS.values())
DTYPES = (oracle.BF16, oracle.F16, np.dtype(np.float32))
SCALES = np.float32([1, 2.0**-7, 3.7, 448 / 65504, 2.0**40, 2.0**-126, 2.0**126, np.finfo(np.float32).max])
# Rules: finite x and infinite product saturate; 0 * inf and any NaN product give NaN.
STRANGE_SCALES = np.float32([0.0, -0.0, -1.0, -(2.0**100), np.inf, -np.inf, np.nan])


def all_values(dtype, fmt):
    """Every value of a 16-bit dtype; for f32 the corner cases and the rounding boundaries."""
    if dtype.itemsize == 2:
        return oracle.all_half_codes(dtype)
    return np.concatenate([oracle.f32_corner_cases(), oracle.rounding_probes(fmt)])


def random_values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-12, 9, shape)).astype(np.float32).astype(dtype)


def each_group(function, x, scale, *rest):
    """The oracle, one group at a time; scale has one element or one for each group."""
    scale = np.broadcast_to(scale, x.shape[:1])
    groups = [function(x[i], scale[i], *rest) for i in range(x.shape[0])]
    return [np.stack(parts) for parts in zip(*groups, strict=True)]


def assert_all_bitwise(got, expected, what):
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        oracle.assert_bitwise(g, e, f"{what}: result {i}")


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize("scales", [SCALES, STRANGE_SCALES], ids=["scales", "strange"])
def test_every_value(emulated_library, dtype, fmt, scales):
    """quantize and quantize_transpose, wide and element by element: one group for each scale."""
    values = all_values(dtype, fmt)
    values = np.resize(values, (values.size // 128 * 128,))
    x = np.broadcast_to(values, (scales.size, values.size))
    codes, top = each_group(oracle.quantize, x, scales, fmt)
    for shift in (0, dtype.itemsize):
        assert_all_bitwise(emulated_library.quantize(x, scales, fmt, shift), (codes, top), "quantize")
        matrices = x.reshape(scales.size, -1, 128)
        square = codes.reshape(matrices.shape)
        expected = (square, square.swapaxes(1, 2), top)
        got = emulated_library.quantize_transpose(matrices, scales, fmt, shift)
        assert_all_bitwise(got, expected, "quantize_transpose")
    oracle.assert_bitwise(emulated_library.amax(x), top, "amax")


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
def test_every_code(emulated_library, dtype, fmt):
    scales = np.concatenate([SCALES, 1 / SCALES, STRANGE_SCALES]).astype(np.float32)
    codes = np.broadcast_to(oracle.all_codes(fmt), (scales.size, 256))
    (expected,) = each_group(lambda *args: (oracle.dequantize(*args),), codes, scales, dtype)
    for shift in (0, dtype.itemsize):
        oracle.assert_bitwise(emulated_library.dequantize(codes, scales, dtype, shift), expected, "dequantize")


# Around a vector (4, 8), a warp's tile (512, 1024), a block's (4096, 8192); and more than a small device's grid.
@pytest.mark.parametrize("size", [1, 3, 4, 7, 8, 9, 31, 511, 512, 513, 1023, 1024, 1025, 8191, 8192, 8197, 150_000])
@pytest.mark.parametrize("dtype", [oracle.BF16, np.dtype(np.float32)], ids=["bf16", "f32"])
def test_sizes(kernels, size, dtype):
    fmt = oracle.E4M3
    x = random_values((1, size), dtype, size)
    codes, top = each_group(oracle.quantize, x, np.float32(3), fmt)
    for shift, data_shift in ((0, 0), (dtype.itemsize, 1), (0, 1)):
        assert_all_bitwise(kernels.quantize(x, 3, fmt, shift, data_shift), (codes, top), f"quantize, shift {shift}")
        oracle.assert_bitwise(kernels.amax(x, shift), top, f"amax, shift {shift}")
    out = oracle.dequantize(codes, np.float32(0.3), dtype)
    for shift in (0, dtype.itemsize):
        oracle.assert_bitwise(kernels.dequantize(codes, 0.3, dtype, shift), out, f"dequantize, shift {shift}")


@pytest.mark.parametrize("groups, size", [(2, 8192), (3, 1000), (3, 1001), (7, 40_000), (40, 24), (700, 5), (5000, 1)])
@pytest.mark.parametrize("own_scales", [False, True], ids=["one_scale", "own_scales"])
def test_groups(kernels, groups, size, own_scales):
    fmt, dtype = oracle.E5M2, oracle.BF16
    x = random_values((groups, size), dtype, groups)
    scales = 2.0 ** np.random.default_rng(1).uniform(-5, 5, groups if own_scales else 1)
    scales = scales.astype(np.float32)
    codes, top = each_group(oracle.quantize, x, scales, fmt)
    assert_all_bitwise(kernels.quantize(x, scales, fmt), (codes, top), "quantize")
    oracle.assert_bitwise(kernels.amax(x), top, "amax")
    (out,) = each_group(lambda *args: (oracle.dequantize(*args),), codes, scales, np.dtype(np.float32))
    oracle.assert_bitwise(kernels.dequantize(codes, scales, np.float32), out, "dequantize")


@pytest.mark.parametrize(
    "g, m, n",
    [(1, 1, 1), (1, 1, 9), (1, 9, 1), (1, 128, 128), (1, 16, 8), (1, 48, 136), (1, 217, 41), (1, 127, 129),
     (1, 130, 264), (3, 128, 256), (2, 100, 100), (40, 3, 5), (1, 16, 3000), (1, 3000, 16), (1, 520, 640)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [oracle.BF16, np.dtype(np.float32)], ids=["bf16", "f32"])
def test_matrices(kernels, g, m, n, dtype):
    fmt = oracle.E4M3
    x = random_values((g, m, n), dtype, m * n)
    scales = np.float32(2.0) ** np.arange(g, dtype=np.float32)
    expected = each_group(oracle.quantize_transpose, x, scales, fmt)
    for shift, data_t_shift in ((0, 0), (dtype.itemsize, 1), (0, 1)):
        got = kernels.quantize_transpose(x, scales, fmt, shift, data_t_shift)
        assert_all_bitwise(got, expected, f"quantize_transpose, shift {shift}")


# Around a block (256), and a grid of several.
@pytest.mark.parametrize("count", [0, 1, 3, 255, 256, 257, 10_000])
@pytest.mark.parametrize("fp8_max, margin", [(448, 0), (57344, 0), (448, 20), (57344, -30), (448, 64), (57344, -64)])
def test_scales(kernels, count, fp8_max, margin):
    values = np.random.default_rng(count).permutation(oracle.f32_corner_cases())
    numerator = np.float32(fp8_max * 2.0**-margin)
    # Half of the amaxes are negative or not finite, so that the stored scale is asked for as often.
    amax, stored = np.resize(values, count), np.resize(values[::-1], count)
    for shift in (0, 4):
        got = kernels.amax_to_scale(amax, stored, numerator, shift)
        assert_all_bitwise(got, oracle.scale_pair(amax, stored, numerator), "amax_to_scale")


AMAXES_SO_FAR = np.float32([0, 2.0**-149, 1e30])
# options -> memsets and copies before the one kernel
AMAX_STARTS = {
    "in place": ({"so_far": True}, 0, 0),
    "in a copy": ({"so_far": True, "in_place": False}, 0, 1),
    "from zero": ({}, 1, 0),
    "not wanted": ({"amax": False}, 0, 0),
}


# Groups of their own blocks, and several groups in the warps of one.
@pytest.mark.parametrize("g, m, n", [(1, 200, 40), (3, 200, 40), (40, 3, 8)])
@pytest.mark.parametrize("case", AMAX_STARTS)
def test_where_the_amax_starts(kernels, case, g, m, n):
    """From what is given, in place or in a copy of it; from zero; or there is none."""
    options, memsets, copies = AMAX_STARTS[case]
    so_far = np.resize(AMAXES_SO_FAR, g) if "so_far" in options else None
    options = options | {"so_far": so_far}
    fmt, x = oracle.E4M3, random_values((g, m, n), oracle.BF16)
    *codes, top = each_group(oracle.quantize_transpose, x, np.float32([1]), fmt)
    top = top if so_far is None else np.maximum(top, so_far)
    kernels.launches()
    data, found = kernels.quantize(x.reshape(g, -1), 1, fmt, **options)
    *both, found_t = kernels.quantize_transpose(x, 1, fmt, **options)
    assert kernels.launches() == (2, 2 * memsets, 2 * copies)
    assert_all_bitwise((data.reshape(x.shape), *both), (codes[0], *codes), "codes")
    if options.get("amax", True):
        assert_all_bitwise((found, found_t), (top, top), "amax")
    else:
        assert found is None and found_t is None


@pytest.mark.parametrize("g, m, n", [(1, 1, 1), (1, 9, 130), (2, 128, 128), (1, 129, 257), (1, 300, 40), (3, 257, 24)])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32"])
def test_column_sums(kernels, g, m, n, dtype):
    """A sum for each 128 rows, in one launch; the same bytes on every device, aligned or not."""
    x = random_values((g, m, n), dtype, m)
    x[0, -1, -1] = np.nan
    codes = each_group(oracle.quantize_transpose, x, np.float32(1), oracle.E5M2)
    kernels.launches()
    first = None
    for shift in (0, dtype.itemsize):
        *others, parts = kernels.quantize_transpose(x, 1, oracle.E5M2, shift, sums=True)
        assert kernels.launches() == (1, 1, 0)
        assert_all_bitwise(others, codes, "with sums")
        for group, part in np.ndindex(parts.shape[:2]):
            rows = x[group, 128 * part : 128 * part + 128]
            oracle.assert_column_sums(parts[group, part], rows, f"group {group}, part {part}")
        first = parts if first is None else first
        oracle.assert_bitwise(parts, first, "sums, aligned or not")


# Shorter and longer than a block; fewer and more quantizers and groups than blocks of push_amaxes have threads.
@pytest.mark.parametrize("groups", [0, 1, 3, 40])
@pytest.mark.parametrize(
    "lengths", [(1,), (1, 2, 3), (255, 256, 257), (1024,) * 3, tuple(range(1, 17)), (5000,)], ids=str
)
@pytest.mark.parametrize("most_recent", [False, True])
def test_histories(kernels, groups, lengths, most_recent):
    """One launch before a step and one after it, for all quantizers; the amaxes are fresh zeros."""
    rng = np.random.default_rng(groups)
    corner_cases = oracle.f32_corner_cases()
    histories = [rng.choice(corner_cases, (groups, length)) for length in lengths]
    stored = [rng.choice(corner_cases, groups) for _ in lengths]
    numerators = np.resize(np.float32([448, 57344 * 2.0**-8]), len(lengths))
    kernels.launches()
    got = kernels.delayed_scales(histories, stored, numerators, most_recent)
    assert kernels.launches() == (min(groups, 1), 0, 0)
    for i, (moved, scale, scale_inv, amax) in enumerate(got):
        oracle.assert_bitwise(amax, np.zeros(groups, np.float32), f"amax {i}")
        for group in range(groups):
            expected = oracle.delayed_scale(histories[i][group], stored[i][group], numerators[i], most_recent)
            assert_all_bitwise(
                (moved[group], scale[group], scale_inv[group]), expected, f"quantizer {i}, group {group}"
            )
    amaxes = [rng.choice(np.abs(corner_cases), groups) for _ in lengths]
    histories = [moved for moved, *_ in got]
    for in_place in (True, False):
        pushed = kernels.push_amaxes(histories, amaxes, in_place)
        assert kernels.launches() == (min(groups, 1), 0, 0 if in_place or groups == 0 else len(lengths))
        for i, history in enumerate(pushed):
            for group in range(groups):
                expected = oracle.push_amax(histories[i][group], amaxes[i][group])
                oracle.assert_bitwise(history[group], expected, f"history {i}, group {group}")


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_no_elements(emulated_library, shape):
    """amax is 0, or what it was so far, and nothing is launched: the plans divide by their sizes."""
    x = np.zeros(shape, oracle.BF16)
    zeros = np.zeros(shape[:1], np.float32)
    oracle.assert_bitwise(emulated_library.amax(x), zeros, "amax")
    so_far = np.full_like(zeros, 3)
    for in_place in (True, False):
        options = {"so_far": so_far, "in_place": in_place}
        oracle.assert_bitwise(emulated_library.quantize(x, 1, oracle.E4M3, **options)[1], so_far, "quantize")
        for matrix in (x[:, :, None], x[:, None]):
            *_, top = emulated_library.quantize_transpose(matrix, 1, oracle.E4M3, **options)
            oracle.assert_bitwise(top, so_far, "quantize_transpose")
    emulated_library.dequantize(x.astype(oracle.E4M3.dtype), 1, np.float32)
