"""quantize_blocks: codes and scales bitwise against the oracle."""

import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from oracle import blocks as oracle_blocks
from parametrize import each_row

from jaxfp8 import ops

from . import cases
from .conftest import EACH_FORMAT, EMULATED, INTERPRETED

# The custom call of a CPU; the reference is what other platforms run, and meshes where
# blocks are long.
IMPLEMENTATIONS = (
    "cpu",
    "reference",
    EMULATED,
    *INTERPRETED,
    pytest.param("gpu", marks=pytest.mark.gpu),
)

F32, F16, BF16 = np.dtype(np.float32), oracle.F16, oracle.BF16
KINDS = {
    "f32": {},
    "f32, power of two": {"power_2_scale": True},
    "ceil": {"scale": "e8m0"},
    "floor": {"scale": "e8m0", "rounding": "floor"},
}
ALL_KINDS = each_row("options", KINDS)
BLOCKS = (
    (1, 32),
    (1, 128),
    (128, 128),
    (1, None),
    (None, None),
    (3, 5),
    (None, 1),
    (32, 1),
)


def check(x, fmt, block, what="", **options):
    """One matrix against the oracle."""
    got = ops.quantize_blocks(x, cases.dtype_of(fmt), block=block, **options)
    expected = oracle_blocks.quantize(x, fmt, block, **options)
    assert_all_bitwise(got, expected, f"{what} {fmt.name}, {block}, {options}")


@EACH_FORMAT
@ALL_KINDS
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_every_half_code(implementation, dtype, fmt, options):
    """In blocks of neighbours, so that most are finite; and in blocks of anything,
    smaller numbers beside larger.
    """
    codes = oracle.all_half_codes(dtype).reshape(2048, 32)
    check(codes, fmt, (1, 32), "neighbours", **options)
    finite = np.where(np.isfinite(oracle.widen(codes)), codes, dtype.type(0))
    mixed = np.random.default_rng(1).permutation(finite.reshape(-1)).reshape(256, 256)
    check(mixed, fmt, (1, 128), "mixed", **options)


@EACH_FORMAT
@ALL_KINDS
def test_f32_corner_cases(implementation, fmt, options):
    """Subnormals, the largest numbers, NaNs with payloads; blocks of one element have
    their own scale.
    """
    x = oracle.f32_corner_cases(3)
    x = x[: x.size // 8 * 8]
    check(x.reshape(-1, 8), fmt, (1, 8), "corner cases", **options)
    check(x[:1024].reshape(1, -1), fmt, (1, 1), "alone", **options)
    exponents = np.ldexp(np.float32(1), np.arange(-149, 128)).reshape(-1, 1)
    check(
        exponents * np.float32([1.5, 1, 0.75]),
        fmt,
        (1, None),
        "powers of two",
        **options,
    )


@EACH_FORMAT
@ALL_KINDS
def test_every_significand_next_to_the_boundary(implementation, fmt, options):
    """The exponent steps where the significand of amax passes 1.75; f32 neighbours of
    that, at several exponents.
    """
    near = (np.float32(1.75).view(np.int32) + np.arange(-4, 5, dtype=np.int32)).view(
        np.float32
    )
    x = np.concatenate(
        [
            np.ldexp(near, e)
            for e in (-130, -120, -119, -118, -112, -111, 0, 1, 126, 127)
        ]
    )
    check(x.reshape(-1, 1), fmt, (1, 1), "1.75", **options)


@EACH_FORMAT
@ALL_KINDS
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_and_ragged_edges(implementation, block, fmt, options):
    for shape in ((1, 1), (7, 33), (130, 257), *cases.EMPTY_MATRIX_SHAPES):
        check(
            cases.random_values(shape, F32, sum(shape)),
            fmt,
            block,
            f"{shape}",
            **options,
        )
