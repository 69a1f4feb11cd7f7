"""The ragged product with scales of blocks, which only Hopper has: its own source on
the host and its PTX, to the bit of `oracle.blocks.hopper_ragged_matmul`.
"""

import fractions

import numpy as np
import oracle
import pytest
from oracle import BF16, E4M3, E5M2, F16, F32, assert_bitwise, blocks as oracle_blocks

from . import emulated
from .gpu import random_codes
from .ptx import machine

# Groups without rows, of one row, inside of a block, and from inside of one block to
# inside of a later one; the rows that are left are of no group.
SIZES = [100, 0, 1, 170, 20]


@pytest.fixture(scope="module", params=["emulated", "ptx"])
def launchers(request):
    """The launchers on Hopper."""
    if request.param == "ptx":
        if reason := machine.why_not():
            pytest.skip(reason)
        yield machine.Interpreted(machine.build())
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


def operands(contraction, m, k, n, a_fmt=E4M3, b_fmt=E4M3, members=1):
    """a, b and their scales, of which neighbours differ by up to 2**24; k is p of a
    contraction.
    """
    if contraction:
        shapes, blocks = ((k, m), (n, m)), ((1, 128), (1, 128))
    else:
        shapes, blocks = ((m, k), (len(SIZES), n, k)), ((1, 128), (128, 128))
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


def check(kernels, arguments, sizes=(SIZES,), out_dtype=F32, model=expected, **options):
    got = kernels.ragged_matmul(
        *arguments, np.int32(sizes), out_dtype=out_dtype, **options
    )
    assert_bitwise(got, model(*arguments, sizes).astype(out_dtype), f"{sizes}")


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
    """In a block that two groups share, in another group's matrix, and beyond the last
    group.
    """
    a, b, *scales = operands(contraction, 300, 40, 24)
    got, clean = (
        launchers.ragged_matmul(*arguments, *scales, np.int32([SIZES]))[0]
        for arguments in (with_nan(a, b, contraction), (a, b))
    )
    if contraction:
        assert np.isnan(got[3]).any()
        got, clean = np.delete(got, 3, axis=0), np.delete(clean, 3, axis=0)
    else:
        assert np.isnan(got[101:271]).any(axis=1).all()
        got, clean = (
            np.delete(got, range(101, 271), 0),
            np.delete(clean, range(101, 271), 0),
        )
    assert_bitwise(got, clean, "other groups")


def with_nan(a, b, contraction):
    """NaN in the fourth group, from row 101 to 271, and in rows of no group."""
    a, b = a.copy(), b.copy()
    if contraction:
        a[..., [101, 150, 295]] = b[..., [101, 150, 295]] = np.nan
    else:
        a[:, [101, 150, 295]] = np.nan
        b[:, 3, 5] = np.nan
    return a, b


# ------------------------------------------------------------------------------ mutants


def neighbours_scale(a, b, a_scale, b_scale, sizes):
    return expected(a, b, a_scale, np.roll(b_scale, 1, axis=-1), sizes)


def neighbours_row(a, b, a_scale, b_scale, sizes):
    return expected(a, b, np.roll(a_scale, 1, axis=-2), b_scale, sizes)


def without_scale(a, b, a_scale, b_scale, sizes):
    return expected(a, b, np.ones_like(a_scale), b_scale, sizes)


def two_roundings(a, b, a_scale, b_scale, sizes):
    """As `expected` for one group of whole blocks, without the fused addition."""
    total = F32(0)
    for i in range(a_scale.shape[-1]):
        part = slice(128 * i, 128 * i + 128)
        sums = oracle.accumulation.tensor_core_matmul(a[0, :, part], b[0, :, part])
        total = total + a_scale[0, :, i, None] * b_scale[0, None, :, i] * sums
    return total[None, None]


def blocks_of_the_group(a, b, a_scale, b_scale, sizes):
    """A group's first block begins at its first row."""
    out, begin = [], 0
    for size in sizes[0]:
        part = slice(begin, begin + size)
        blocks = slice(begin // 128, None)
        of_group = (
            a[..., part],
            b[..., part],
            a_scale[..., blocks],
            b_scale[..., blocks],
        )
        out.append(expected(*of_group, [[size]])[:, 0])
        begin += size
    return np.stack(out, axis=1)


@pytest.mark.parametrize(
    "mutant", [neighbours_scale, neighbours_row, without_scale, blocks_of_the_group]
)
def test_mutants_are_caught(emulated_library, mutant):
    """What a kernel would give that reads the scale of another block, or none."""
    arguments = operands(True, 300, 40, 24)
    with emulated.hopper(emulated_library.library):
        check(emulated_library, arguments)
        with pytest.raises(AssertionError):
            check(emulated_library, arguments, model=mutant)


def test_a_sum_is_added_with_one_rounding(emulated_library):
    arguments, sizes = operands(True, 256, 40, 24), [[256]]
    with emulated.hopper(emulated_library.library):
        check(emulated_library, arguments, sizes)
        with pytest.raises(AssertionError):
            check(emulated_library, arguments, sizes, model=two_roundings)


def test_the_oracle_rounds_once():
    """Against exact fractions: sums that cancel, and sums in the middle of two numbers
    and next to it.
    """
    rng = np.random.default_rng(0)
    x, y, z = F32(rng.standard_normal((3, 500)) * 2.0 ** rng.uniform(-30, 30, (3, 500)))
    z[:100] = -x[:100] * y[:100]
    x[100:200], y[100:200] = 1 + F32(2.0**-12), 1 - F32(2.0**-12)
    z[100:200] = F32(2.0) ** np.arange(-50, 50)
    got = oracle_blocks.fused_multiply_add(x, y, z)
    for i, numbers in enumerate(zip(x, y, z, strict=True)):
        exact = fractions.Fraction(float(numbers[0])) * fractions.Fraction(
            float(numbers[1])
        ) + fractions.Fraction(float(numbers[2]))
        near = [got[i], *np.nextafter(got[i], F32([-np.inf, np.inf]))]
        distances = [abs(fractions.Fraction(float(number)) - exact) for number in near]
        assert distances[0] == min(distances), numbers
        if distances[0] in distances[1:]:  # a tie goes to the even number
            assert got[i].view(np.int32) % 2 == 0, numbers
