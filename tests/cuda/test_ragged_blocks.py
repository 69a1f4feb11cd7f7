"""The ragged product with scales of blocks, which only Hopper has: its own source on
the host and its PTX, to the bit of `oracle.blocks.hopper_ragged_matmul`.
"""

import numpy as np
import pytest
from ops.cases import random_codes
from oracle import BF16, E4M3, E5M2, F16, F32, assert_bitwise, blocks as oracle_blocks

from . import emulated
from .ptx import machine

# Groups without rows, of one row, inside of a block, and from inside of one block to
# inside of a later one; the rows that are left are of no group.
SIZES = [100, 0, 1, 170, 20]


@pytest.fixture(scope="module", params=["emulated", "ptx"])
def launchers(request):
    """The launchers on Hopper."""
    if request.param == "ptx":
        yield machine.launchers()
    else:
        made = request.getfixturevalue("emulated_library")
        with emulated.hopper(made.library):
            yield made


@pytest.fixture(params=[(132, False), (1, True)], ids=["132", "1-backwards"])
def kernels(launchers, request):
    """On devices of two sizes, so that grids loop; threads in either order."""
    launchers.configure(*request.param)
    yield launchers
    launchers.configure()


@pytest.fixture(scope="module", params=[False, True], ids=["rows", "contraction"])
def contraction(request):
    return request.param


def operands(contraction, m, k, n, a_fmt=E4M3, b_fmt=E4M3, *, members=1, groups=5):
    """a, b and their scales, of which neighbours differ by up to 2**24; k is p of a
    contraction.
    """
    if contraction:
        shapes, blocks = ((k, m), (n, m)), ((1, 128), (1, 128))
    else:
        shapes, blocks = ((m, k), (groups, n, k)), ((1, 128), (128, 128))
    rng = np.random.default_rng(0)
    codes, scales = [], []
    for shape, block, fmt in zip(shapes, blocks, (a_fmt, b_fmt), strict=True):
        shape = (members, *shape)
        codes.append(random_codes(shape, fmt, len(codes)))
        counts = [-(-size // b) for size, b in zip(shape[-2:], block, strict=True)]
        exponents = rng.uniform(-12, 12, (*shape[:-2], *counts))
        scales.append(F32(2.0**exponents))
    return *codes, *scales


def expected(a, b, a_scale, b_scale, sizes):
    members = zip(a, b, a_scale, b_scale, sizes, strict=True)
    return np.stack([oracle_blocks.hopper_ragged_matmul(*each) for each in members])


def check(kernels, arguments, sizes=(SIZES,), out_dtype=F32, **options):
    got = kernels.ragged_matmul(
        *arguments, np.int32(sizes), out_dtype=out_dtype, **options
    )
    assert_bitwise(got, expected(*arguments, sizes).astype(out_dtype), f"{sizes}")


def test_groups_in_blocks(kernels, contraction):
    """Two tiles of columns, whose border is inside of a block; three blocks of the
    contraction, the last one smaller.
    """
    check(kernels, operands(contraction, 300, 140 if contraction else 300, 200))


@pytest.mark.parametrize(
    "out_dtype, b_fmt, shape, shift",
    [
        (BF16, E5M2, (304, 160, 16), 0),
        (F16, E4M3, (304, 160, 16), 1),
        (F32, E5M2, (291, 130, 9), 16),
    ],
    ids=["bfloat16", "float16", "float32"],
)
def test_dtypes_and_alignment(launchers, contraction, out_dtype, b_fmt, shape, shift):
    """Two members; rows that are whole 16-byte pieces on their boundary and off it, and
    rows that are not.
    """
    a, b, *scales = operands(contraction, *shape, E5M2, b_fmt, members=2)
    # float16 holds the results
    scales = [F32(scale / 2**16) for scale in scales]
    sizes = [SIZES, [0, 290, 0, 0, 0]]
    check(launchers, (a, b, *scales), sizes, out_dtype, shift=shift)


def test_sums_that_flush(launchers, contraction):
    """A product of scales that is subnormal, or zero, is so in the result."""
    a, b, a_scale, b_scale = operands(contraction, 291, 40, 24)
    check(launchers, (a, b, a_scale * F32(2.0**-70), b_scale * F32(2.0**-70)))


def test_nan_stays_in_its_group(launchers, contraction):
    """In the fourth group, from row 101 to 271 and in a block that two groups share, in
    its matrix, and in rows of no group.
    """
    a, b, *scales = operands(contraction, 300, 40, 24)
    clean = launchers.ragged_matmul(a, b, *scales, np.int32([SIZES]))[0]
    bad = [101, 150, 295]
    if contraction:
        a[..., bad] = b[..., bad] = np.nan
        of_group = [3]
    else:
        a[:, bad] = b[:, 3, 5] = np.nan
        of_group = range(101, 271)
    got = launchers.ragged_matmul(a, b, *scales, np.int32([SIZES]))[0]
    assert np.isnan(np.take(got, of_group, 0)).any(axis=-1).all() or contraction
    others = [np.delete(x, of_group, 0) for x in (got, clean)]
    assert_bitwise(*others, "other groups")
