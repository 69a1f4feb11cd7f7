"""The launchers of the CUDA kernels, run on the host by emulator/, against the oracle:
what tests/ops, which runs over the emulated handlers too, does not reach: buffers off
alignment and between guards, and small devices.

The emulated exponential and reciprocal are off by as much as NVIDIA's manual allows.
The hardware's side of ptx.h's contract is for a GPU to show.
"""

import functools

import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from ops.cases import random_values
from oracle import (
    assert_bitwise,
    blocks as oracle_blocks,
    gradients as oracle_gradients,
)

from jaxfp8.ops import ClampedSwiGLU, is_gated

E4M3, E5M2, BF16, F32 = oracle.E4M3, oracle.E5M2, oracle.BF16, np.dtype(np.float32)
CLAMPED = ClampedSwiGLU(1.5, alpha=1.702, offset=1.0)


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


# -------------------------------------------------------------------------------- tiles
# By op: `(x [g, m, n]) -> (a call of the launcher, a check of its results)`.


def transposed(x):
    scales = np.float32(2.0) ** np.arange(len(x), dtype=np.float32)
    expected = each_group(oracle.quantize_transpose, x, scales, E4M3)
    return lambda k, **shifts: k.quantize_transpose(
        x, scales, E4M3, **shifts
    ), lambda got: assert_all_bitwise(got, expected, "quantize_transpose")


def paired(x):
    second, scale = 4 * x[:, ::-1], np.float32(3)
    expected = each_group(
        oracle.quantize_transpose, np.concatenate([x, second], 2), scale, E4M3
    )

    def check(got):
        assert_all_bitwise(got, expected, "quantize_pair")

    return lambda k, **shifts: k.quantize_pair(x, second, 3, E4M3, **shifts), check


def with_sums(x):
    expected = each_group(oracle.quantize_transpose, x, np.float32(1), E5M2)

    def check(got):
        *others, parts = got
        assert_all_bitwise(others, expected, "with sums")
        for group, part in np.ndindex(parts.shape[:2]):
            oracle.assert_column_sums(
                parts[group, part], x[group, 128 * part : 128 * part + 128]
            )

    return lambda k, **shifts: k.quantize_transpose(
        x, 1, E5M2, sums=True, **shifts
    ), check


def activated(name, x):
    x = np.stack([x, x[:, ::-1]], axis=2) if is_gated(name) else x[:, :, None]

    def check(got):
        for i, (data, data_t, top) in enumerate(zip(*got, strict=True)):
            values = oracle.activation(x[i] if is_gated(name) else x[i, :, 0], name)
            values.check(data, data_t, top, np.float32(3), E4M3, what=f"{name}, {i}")

    return lambda k, **shifts: k.quantize_activation(x, 3, E4M3, name, **shifts), check


def gradient(name, x):
    gated = is_gated(name)
    x, grad = (
        (np.stack([x, x[:, ::-1]], axis=2) if gated else x[:, :, None]),
        x[:, :, ::-1].copy(),
    )

    def check(got):
        for i, (data, data_t, top, parts) in enumerate(zip(*got, strict=True)):
            values = oracle_gradients.activation(
                x[i] if gated else x[i, :, 0], grad[i], name
            ).rows()
            values.check(data, data_t, top, np.float32(3), E5M2, what=f"{name}, {i}")
            for part, total in enumerate(parts):
                rows = values.rows(128 * part, 128 * part + 128)
                rows.sums().check(total, "sums")

    def run(kernels, **shifts):
        *without, top = kernels.quantize_activation_grad(
            x, grad, 3, E5M2, name, transpose=False, **shifts
        )
        *others, _ = got = kernels.quantize_activation_grad(
            x, grad, 3, E5M2, name, sums=True, **shifts
        )
        assert_all_bitwise(
            [without[0], top], [others[0], others[2]], "without data_t and sums"
        )
        return got

    return run, check


def norm_operands(g, m, n, statistics=2):
    """Statistics, gamma and beta."""
    rng = np.random.default_rng(n)
    gamma, beta = rng.standard_normal((2, g, n)).astype(np.float32)
    return (
        random_values((g, m, statistics), np.float32, 1),
        gamma,
        beta if statistics == 2 else None,
    )


def check_norm(got, inputs, scale, fmt):
    """Bitwise: with the statistics given, every operation has one result."""
    x, statistics, gamma, beta = inputs
    for i in range(len(x)):
        values = oracle.affine(
            x[i], statistics[i], gamma[i], None if beta is None else beta[i]
        )
        expected = oracle.quantize_transpose(values, np.float32(scale), fmt)
        assert_all_bitwise([part[i] for part in got], expected, f"group {i}")


def normed(statistics, x):
    inputs = x, *norm_operands(*x.shape, statistics)
    return lambda k, **shifts: k.quantize_norm(
        *inputs, 30, E5M2, **shifts
    ), lambda got: check_norm(got, inputs, 30, E5M2)


SCALINGS = {
    "f32": {},
    "f32, power of two": {"power_2_scale": True},
    "ceil": {"scale": "e8m0"},
    "floor": {"scale": "e8m0", "rounding": "floor"},
}


def in_blocks(block, scaling, x):
    x = x.copy()
    x.flat[[0, -1]] = np.nan, np.inf
    expected = []
    for of in (x, x.swapaxes(1, 2)):
        pairs = [
            oracle_blocks.quantize(matrix, E4M3, block, **SCALINGS[scaling])
            for matrix in of
        ]
        fill = 1 if scaling.startswith("f32") else 0  # the scale of zeros
        scales = [
            oracle_blocks.cublaslt_layout(scale, block, *of.shape[1:], fill)
            for _, scale in pairs
        ]
        expected += [np.stack([codes for codes, _ in pairs]), np.stack(scales)]

    def run(kernels, **shifts):
        one = kernels.quantize_blocks_transpose(
            x, E4M3, block, scaling, transpose=False, **shifts
        )
        assert_all_bitwise(one, expected[:2], "one layout")
        return kernels.quantize_blocks_transpose(x, E4M3, block, scaling, **shifts)

    return run, lambda got: assert_all_bitwise(got, expected, f"{block}, {scaling}")


TILES = {
    "quantize_transpose": transposed,
    "with sums": with_sums,
    "quantize_pair": paired,
    "silu": functools.partial(activated, "silu"),
    "gelu_gated": functools.partial(activated, "gelu_gated"),
    "gradient of gelu": functools.partial(gradient, "gelu"),
    "gradient of silu_gated": functools.partial(gradient, "silu_gated"),
    "gradient of clamped": functools.partial(gradient, CLAMPED),
    "rms": functools.partial(normed, 1),
    "layer": functools.partial(normed, 2),
} | {
    f"{block}, {scaling}": functools.partial(in_blocks, block, scaling)
    for block, scalings in {
        (1, None): ("f32",),
        (1, 32): ("ceil", "floor"),
        (1, 128): ("f32", "f32, power of two"),
        (128, 128): ("f32, power of two",),
    }.items()
    for scaling in scalings
}
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


@pytest.mark.parametrize("op", TILES)
@pytest.mark.parametrize("g, m, n", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
def test_tiles(kernels, g, m, n, dtype, op):
    run, check = TILES[op](random_values((g, m, n), dtype, m * n))
    for shift, data_t_shift in ((0, 0), (dtype.itemsize, 1), (0, 1)):
        check(run(kernels, shift=shift, data_t_shift=data_t_shift))


@pytest.mark.parametrize("name", ["gelu", "silu", "gelu_gated", "silu_gated", CLAMPED])
def test_gradients_far_below_zero(kernels, name):
    """They are 0 where x is so large that g x z' of a nearly vanished sigmoid is
    not.
    """
    x = np.repeat(-(10.0 ** np.arange(1, 18, dtype=np.float32)), 8).reshape(1, -1, 1, 8)
    x = np.concatenate([x, np.ones_like(x)], 2) if is_gated(name) else x
    for row in range(x.shape[1]):  # an amax alone shows what has no code
        x_row, grad = x[:, row : row + 1], np.full((1, 1, 8), 0.7, np.float32)
        data, data_t, top = (
            part[0]
            for part in kernels.quantize_activation_grad(x_row, grad, 3, E5M2, name)
        )
        values = oracle_gradients.activation(
            x_row[0] if is_gated(name) else x_row[0, :, 0], grad[0], name
        )
        what = f"{name}, {x_row.flat[0]}"
        values.rows().check(data, data_t, top, np.float32(3), E5M2, what=what)


@pytest.mark.parametrize("g, m, n", SHAPES)
@pytest.mark.parametrize("block", [32, 6, 128])
def test_transposed_blocks(kernels, g, m, n, block):
    random = np.random.default_rng(m)
    data = random.integers(0, 256, (g, m, n), np.uint8).view(E5M2.dtype)
    scale_inv = random.integers(120, 134, (g, m, -(-n // block)), np.uint8)
    scale_inv[random.random(scale_inv.shape) < 0.01] = 255
    pairs = zip(data, scale_inv.view(oracle_blocks.E8M0), strict=True)
    groups = [oracle_blocks.transpose(*pair, E5M2, block) for pair in pairs]
    expected = [
        np.stack([group[0] for group in groups]),
        np.stack([group[1] for group in groups]).view(np.uint8),
    ]
    for shift, data_t_shift in ((0, 0), (1, 1), (0, 1), (4, 0)):
        got = kernels.transpose_blocks(
            data, scale_inv, block, shift=shift, data_t_shift=data_t_shift
        )
        assert_all_bitwise(got, expected, f"shifted by {shift}, {data_t_shift}")


@pytest.mark.parametrize("g, m, n", SHAPES)
def test_transposed_codes(kernels, g, m, n):
    """All bytes, in vectors and one by one, on either side."""
    data = np.random.default_rng(m).integers(0, 256, (g, m, n), np.uint8)
    for shifts in ((0, 0), (8, 1), (1, 0)):
        got = kernels.transpose_codes(data.view(E5M2.dtype), *shifts)
        np.testing.assert_array_equal(got.view(np.uint8), data.swapaxes(1, 2))


@pytest.mark.parametrize("m, n", [(3, 8), (3, 5), (130, 136), (130, 131)])
def test_nothing_outside_of_a_matrix_is_in_the_amax_of_a_norm(launchers, m, n):
    """Neither a beta, which here is what the values add up to 0 with, nor the
    statistics of the next group.
    """
    x, statistics = np.zeros((2, m, n), np.float32), np.empty((2, m, 2), np.float32)
    statistics[:] = np.float32([[[1, 2]], [[1, 0]]])
    gamma, beta = np.full((2, 1, n), 50, np.float32) * np.float32([[[1]], [[2]]])
    data, data_t, top = launchers.quantize_norm(x, statistics, gamma, beta, 1, E4M3)
    assert (
        top.tolist() == [0, 100]
        and not oracle.bits(data)[0].any()
        and not oracle.bits(data_t)[0].any()
    )


# The operand, and the element that is bad.
BAD_ELEMENTS = {
    "rstd": (1, (0, 18, 0)),
    "mean": (1, (0, 18, 1)),
    "gamma": (2, (0, 7)),
    "beta": (3, (0, 7)),
}


@pytest.mark.parametrize("where", BAD_ELEMENTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
@pytest.mark.parametrize("n", [128, 40])
def test_norm_of_bad_parameters(launchers, where, bad, n):
    """Codes of what is not finite, and of what is not any more, are NaN; in a whole
    tile, and at an edge.
    """
    inputs = random_values((1, 128, n), np.float32), *norm_operands(1, 128, n)
    operand, element = BAD_ELEMENTS[where]
    inputs[operand][element] = bad
    check_norm(launchers.quantize_norm(*inputs, 2.0**100, E4M3), inputs, 2.0**100, E4M3)
