"""block_scaled_matmul: within the derived bound of the exact product of dequantized
numbers (oracle/blocks.py).
"""

import itertools
import warnings

import jax
import lowering
import numpy as np
import oracle
import pytest
from numpy.testing import assert_array_equal
from oracle import E4M3, blocks as oracle_blocks
from parametrize import each_row

from jaxfp8 import ops
from jaxfp8.ops import _blocks

from . import cases
from .conftest import EACH_OUT_DTYPE, EMULATED
from .test_support import gpu, machine as machine

F32, E8M0 = np.dtype(np.float32), oracle_blocks.E8M0
ONE_SCALE = (None, "f32")
# How each operand may be scaled: block and scale.
SCALINGS = {
    "tensor": ONE_SCALE,
    "rows": ((1, None), "f32"),
    "1x128": ((1, 128), "f32"),
    "128x128": ((128, 128), "f32"),
    "MX": ((1, 32), "e8m0"),
    "5x7": ((5, 7), "f32"),
    "MX 4x16": ((4, 16), "e8m0"),
}
# Those of recipes, and the others against one of each kind.
PAIRS = (
    ("tensor", "tensor"),
    ("rows", "rows"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
    ("1x128", "1x128"),
    ("MX", "MX"),
    ("5x7", "MX 4x16"),
    ("MX", "rows"),
    ("tensor", "MX"),
    ("tensor", "1x128"),
)
ALL_PAIRS = pytest.mark.parametrize("pair", PAIRS, ids=" by ".join)
FORMAT_PAIRS = tuple(itertools.product(cases.FORMATS, repeat=2))


# On a GPU: cuBLASLt where it has the mode, else the reference.
IMPLEMENTATIONS = ("cpu", EMULATED, pytest.param("gpu", marks=pytest.mark.gpu))


def operand(shape, scaling, fmt=E4M3, seed=0, **options):
    """(codes, scales) of random numbers as the oracle quantizes them; neighbouring
    blocks differ by up to 2**8.
    """
    block, scale = SCALINGS[scaling]
    x = cases.random_values(shape, F32, seed, spread=1.0)
    rows, cols = (2.0 ** (np.arange(size) // 32 % 5 * 2 - 4) for size in shape)
    x = np.float32(x * rows[:, None] * cols[None])
    if block is None:
        scale = np.float32(fmt.max / max(float(np.abs(x).max(initial=0)), 1e-3))
        return oracle.quantize(x, scale, fmt)[0], np.float32([1 / scale])
    return oracle_blocks.quantize(x, fmt, block, scale=scale, **options)


def operands(m, n, k, pair, formats=(E4M3, E4M3), **options):
    sides = [
        operand((rows, k), s, fmt, i, **options)
        for i, (rows, s, fmt) in enumerate(zip((m, n), pair, formats, strict=True))
    ]
    (a, a_scale), (b, b_scale) = sides
    return a, b, a_scale, b_scale


def blocks_of(pair):
    return dict(
        zip(("a_block", "b_block"), (SCALINGS[s][0] for s in pair), strict=True)
    )


def check(implementation, args, pair, out_dtype=F32, **options):
    got = jax.jit(
        lambda *args: ops.block_scaled_matmul(
            *args, **blocks_of(pair), out_dtype=out_dtype, **options
        )
    )(*args)
    assert got.dtype == out_dtype
    summed = cases.accumulation(implementation, options.pop("precise", False))
    expected = oracle_blocks.matmul(
        *args, **blocks_of(pair), out_dtype=out_dtype, **options, **summed
    )
    expected.check(got, f"{pair}")


SHAPES = ((16, 48, 256), (7, 5, 131), (130, 129, 64), (1, 1, 1))
EMPTY_SHAPES = ((0, 5, 7), (5, 0, 7), (5, 7, 0))


@ALL_PAIRS
@pytest.mark.parametrize("shape", SHAPES + EMPTY_SHAPES, ids=str)
def test_shapes(implementation, shape, pair):
    check(implementation, operands(*shape, pair), pair)


@pytest.mark.parametrize(
    "formats", FORMAT_PAIRS, ids=lambda formats: "x".join(fmt.name for fmt in formats)
)
@EACH_OUT_DTYPE
def test_formats_and_output_dtypes(implementation, formats, out_dtype):
    for pair in (("1x128", "128x128"), ("MX", "MX"), ("rows", "rows")):
        args = operands(33, 17, 150, pair, formats)
        bias = np.float32(np.linspace(-900, 500, 17)).astype(out_dtype)
        for options in ({}, {"bias": bias}, {"precise": True}):
            check(implementation, args, pair, out_dtype, **options)


@pytest.mark.parametrize(
    "value, exponents",
    [(1, (-127, 127)), (1, (-127, 0)), (1, (-64, -62)), (256, (119, -127))],
)
def test_extreme_powers_of_two(implementation, value, exponents):
    """2**-127 is a subnormal float. Results are exact: all products are the same
    multiple of a power of two.
    """
    a = np.full((2, 64), 448, E4M3.dtype)
    b = np.full((3, 64), value, E4M3.dtype)
    scales = [
        np.full((rows, 2), e + 127, np.uint8).view(E8M0)
        for rows, e in zip((2, 3), exponents, strict=True)
    ]
    got = ops.block_scaled_matmul(
        a, b, *scales, a_block=(1, 32), b_block=(1, 32), out_dtype=F32
    )
    exact = np.full((2, 3), 64 * 448 * value * 2.0 ** sum(exponents), F32)
    cases.assert_bitwise(got, exact, f"{exponents}")


def test_bad_blocks_reach_their_rows_and_columns_only(implementation):
    """An infinite block in a row, a NaN code in a column: NaN is right where the exact
    product is NaN alone.
    """
    x = cases.random_values((20, 96), F32, 1, spread=1)
    x[3, 40] = np.inf
    for pair in (("MX", "MX"), ("1x128", "1x128"), ("rows", "rows")):
        block, scale = SCALINGS[pair[0]]
        a, a_scale = oracle_blocks.quantize(x, E4M3, block, scale=scale)
        b, b_scale = operand((18, 96), pair[1])
        b[11, 0] = np.nan
        check(implementation, (a, b, a_scale, b_scale), pair)


# ------------------------------------------------------------------- shapes, transforms


@ALL_PAIRS
def test_dimensions_of_their_own(implementation, pair):
    """Two batch dimensions, two of m, one of n, two contracting: as merged."""
    a, b, *scales = operands(6, 10, 64, pair)
    members = [[np.roll(codes, i, axis=0) for codes in (a, b)] for i in range(4)]
    all_a, all_b = (np.stack(codes) for codes in zip(*members, strict=True))
    batched_scales = [
        x if x.ndim == 1 else np.broadcast_to(x, (2, 2, *x.shape)) for x in scales
    ]
    bias = np.arange(40, dtype=F32).reshape(4, 10)
    got = ops.block_scaled_matmul(
        all_a.reshape(2, 2, 2, 3, 8, 8),
        all_b.reshape(2, 2, 10, 8, 8),
        *batched_scales,
        **blocks_of(pair),
        bias=bias.reshape(2, 2, 10),
        batch=2,
        contracting=2,
        out_dtype=F32,
        precise=True,
    )
    assert got.shape == (2, 2, 2, 3, 10)
    options = blocks_of(pair) | cases.accumulation(implementation, precise=True)
    results = np.reshape(got, (4, 6, 10))
    for codes, row, result in zip(members, bias, results, strict=True):
        expected = oracle_blocks.matmul(*codes, *scales, bias=row, **options)
        expected.check(result, f"{pair}")


# ------------------------------------------------------------------ what CUDA lowers to

ON_HOPPER = (
    ("rows", "rows"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
)
ON_BLACKWELL = (("MX", "MX"),)
NOWHERE = (
    ("128x128", "128x128"),
    ("rows", "1x128"),
    ("tensor", "1x128"),
    ("MX", "1x128"),
    ("5x7", "5x7"),
)


def cuda_text(pair, m=32, n=48, k=256, formats=(E4M3, E4M3), **options):
    args = operands(m, n, k, pair, formats)
    return lowering.cuda_text(
        lambda *args: ops.block_scaled_matmul(*args, **blocks_of(pair), **options),
        *args,
    )


# The GPUs that a program is for, and what all of them multiply.
OF_GPUS = {
    (): ON_HOPPER + ON_BLACKWELL,
    ("9.0",): ON_HOPPER,
    ("10.0",): ON_BLACKWELL,
    ("10.3",): ON_BLACKWELL,
    ("12.0",): ON_BLACKWELL,
    ("8.9",): (),
    ("9.0", "10.0"): (),
}


@pytest.mark.parametrize("capabilities", OF_GPUS, ids=str)
def test_custom_call_where_all_gpus_have_the_mode(machine, capabilities):
    """What a GPU lacks is said once, and refused where custom calls are asked for."""
    machine(lowered_for=map(gpu, capabilities))
    for pair in ON_HOPPER + ON_BLACKWELL + NOWHERE:
        has_mode = pair in OF_GPUS[capabilities]
        with warnings.catch_warnings(record=True, action="always") as caught:
            text = cuda_text(pair)
        assert ("@jaxfp8_block_scaled_matmul_v1" in text) == has_mode, pair
        assert len(caught) == (not has_mode)
        if not has_mode:
            message = r'implementation\("ffi"\): block_scaled_matmul: cuBLASLt'
            with ops.implementation("ffi"), pytest.raises(RuntimeError, match=message):
                cuda_text(pair)


@pytest.mark.parametrize(
    "capabilities",
    [(), ("9.0",), ("10.0",), ("10.0", "12.0"), ("9.0", "10.0")],
    ids=str,
)
def test_powers_of_two_are_mx_from_blackwell_on(machine, capabilities):
    """As E8M0 in tiles of 128 by 128; on Hopper, and where no GPU is known, as
    float32.
    """
    machine(lowered_for=map(gpu, capabilities))
    for pair in ON_HOPPER:
        with warnings.catch_warnings(record=True, action="always") as caught:
            text = cuda_text(pair, power_2_scale=True)
        calls = [line for line in text.splitlines() if "custom_call @jaxfp8" in line]
        if capabilities == ("9.0", "10.0"):
            assert not calls and "this GPU has" in str(caught[0].message)
            assert "power_2_scale" not in str(caught[0].message)
            continue
        is_mx = "10.0" in capabilities
        (call,) = calls
        modes = ("1x32", "1x32") if is_mx else pair
        assert (
            f'a_scales = "{modes[0]}", b_scales = "{modes[1]}"' in call and not caught
        )
        assert ("tensor<1x1x2x512xui8>, tensor<1x1x2x512xui8>" in call) == is_mx


# Numbers of all sizes, in blocks of one size: the smallest subnormal, the largest
# float, zeros, an Inf and a NaN too.
AMAXES = np.float32(
    [
        1e-45,
        2.0**-126,
        3e-30,
        1,
        448,
        449,
        57344,
        1e30,
        np.finfo(F32).max,
        0,
        np.inf,
        np.nan,
    ]
)


@each_row("fmt", oracle.FORMATS)
@pytest.mark.parametrize("scaling", ["1x128", "128x128", "rows"])
def test_powers_of_two_are_exact_as_mx(fmt, scaling):
    """The same codes with the scales of blocks of 32 are the same numbers."""
    block, _ = SCALINGS[scaling]
    rows, k = len(AMAXES) * 128 - 5, 300
    top = np.repeat(AMAXES, 128)[:rows, None] * np.float32(
        [1] * 128 + [2**-7] * 128 + [2**-20] * 44
    )
    with np.errstate(invalid="ignore"):
        x = top * np.random.default_rng(0).choice(
            np.float32([-1, 1, 0.7, 0.1, 0]), (rows, k)
        )
    codes, scales = oracle_blocks.quantize(x, fmt, block, power_2_scale=True)
    got = np.asarray(_blocks.as_mx(scales[None], block, rows, k))[0]
    assert got.shape == (rows, -(-k // 32)) and got.dtype == E8M0
    expected = oracle_blocks.dequantize(codes, scales, block)
    assert_array_equal(oracle_blocks.dequantize(codes, got, (1, 32)), expected)


def test_scales_that_are_no_powers_of_two_are_nan_as_mx():
    exact = np.float32([2.0**-126, 2.0**-120, 1, 2.0**120, 2.0**127])
    wrong = np.float32([2.0**-127, 0, 3, 1 + 2.0**-23, -1, np.inf, np.nan])
    scales = np.concatenate([exact, wrong])[None, None]
    got = np.asarray(_blocks.as_mx(scales, (1, 128), 1, 128 * scales.size))[0]
    got = oracle_blocks.scale_values(got[:, ::4])[0]
    assert_array_equal(got[: len(exact)], exact)
    assert np.isnan(got[len(exact) :]).all()


def test_attributes_of_the_custom_call(machine):
    """Fast accumulation for whole rows alone; what is padded; a bias is added by XLA,
    to f32.
    """
    machine(lowered_for=[gpu("9.0")])
    rows, blocks = ON_HOPPER[0], ON_HOPPER[2]
    for precise, pair, expected in (
        (False, rows, "false"),
        (True, rows, "true"),
        (False, blocks, "true"),
    ):
        (line,) = (
            x
            for x in cuda_text(pair, precise=precise).splitlines()
            if "custom_call @jaxfp8" in x
        )
        assert f"precise = {expected}" in line, line
    (line,) = (
        x
        for x in cuda_text(ON_HOPPER[2], 5, 7, 33, bias=np.ones(7, F32)).splitlines()
        if "@jaxfp8" in x
    )
    assert (
        "tensor<16x128xf8E4M3FN>, tensor<16x128xf8E4M3FN>, tensor<1x1x16xf32>, "
        "tensor<1x1x4xf32>" in line
    )
    assert "tensor<16x16xf32>, tensor<33554432xui8>" in line
    assert 'a_scales = "1x128", b_scales = "128x128"' in line
