"""The ragged product's own source on the host, against the oracle; its tiles and its
shared memory.

Warps multiply as on Ada, warpgroups as on Hopper; their tensor cores are the least
precise there are.
"""

import numpy as np
import oracle
import pytest
from ops.cases import random_codes
from oracle import E4M3, E5M2, F32, accumulation as oracle_accumulation

from .conftest import OTHER_ARCHITECTURES as OTHERS
from .ptx import machine

FORMATS = tuple(oracle.FORMATS.values())
TILE, SLICE, CHUNK = 128, 64, 16
# How products add, and after how many elements f32 takes over in a precise one.
DEVICES = {"warps": ("8.9", {"step": 16}, 32), "warpgroups": ("9.0", {"step": 32}, 128)}
A_INV, B_INV = F32(0.0123), F32(1.7e-4)


@pytest.fixture(
    scope="module",
    params=["emulated-warps", "emulated-warpgroups", "ptx-90a", *OTHERS],
)
def launchers(request):
    """The launchers as the other kernels have them, and for the emulated ones both ways
    to multiply.
    """
    kind, name = request.param.split("-")
    if kind == "ptx":
        made = machine.launchers(name)
        tile = "warpgroups" if name == "90a" else "warps"
    else:
        made, tile = request.getfixturevalue("emulated_library"), name
        made.library.emulator_be_hopper(tile == "warpgroups")
    made.device, made.additions, made.promotion = DEVICES[tile]
    yield made
    if kind == "emulated":
        made.library.emulator_be_hopper(0)


def operands(contraction, groups, m, k, n, a_fmt=E4M3, b_fmt=E5M2, members=1):
    a, b = ((k, m), (n, m)) if contraction else ((m, k), (groups, n, k))
    return random_codes((members, *a), a_fmt, 1), random_codes((members, *b), b_fmt, 2)


def check(
    kernels,
    a,
    b,
    sizes,
    a_scale=A_INV,
    b_scale=B_INV,
    *,
    precise=True,
    out_dtype=F32,
    what="",
    **options,
):
    sizes = np.int32(sizes).reshape(a.shape[0], -1)
    got = kernels.ragged_matmul(
        a, b, a_scale, b_scale, sizes, out_dtype=out_dtype, precise=precise, **options
    )
    a_scale, b_scale = (
        np.broadcast_to(scale, a.shape[:1]) for scale in (a_scale, b_scale)
    )
    options = {
        "out_dtype": out_dtype,
        "accumulation": "precise" if precise else "fast",
        "device": kernels.device,
    }
    for i in range(a.shape[0]):
        expected = oracle.ragged_matmul(
            a[i], b[i], a_scale[i], b_scale[i], sizes[i], **options
        )
        expected.check(got[i], f"{sizes} {what}")


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("b_fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_sums_are_those_of_the_model(launchers, b_fmt, precise):
    """To the bit: which products an addition takes, and when it begins at zero, do not
    depend on chance.
    """
    a, b = operands(False, 1, 40, 320, 24, b_fmt=b_fmt)
    # subnormal codes, and zeros, alone
    a[0, :16] = np.resize(oracle.all_codes(E4M3)[:9], (16, 320))
    got = launchers.ragged_matmul(a, b, 1, 1, np.int32([[40]]), precise=precise)
    promotion = launchers.promotion if precise else None
    expected = oracle_accumulation.tensor_core_matmul(
        a[0], b[0, 0], **launchers.additions, promotion=promotion
    )
    oracle.assert_bitwise(got[0], expected, "sums")


def test_tiles_beyond_2_to_the_31(emulated_library):
    """More tiles than 32 bits count, in dimensions as large as they may be."""
    size = 2**31 - 1024
    plan = (0, 3, 1, size, size, 16)
    per_member = (-(-size // TILE)) ** 2
    sizes = np.int32([[size]] * 3)
    assert emulated_library.ragged_tiles(*plan) >= 3 * per_member > 2**48
    last = emulated_library.ragged_tile(sizes, *plan, 3 * per_member - 1)
    edge = (size - 1) // TILE * TILE
    assert last == [2, 0, edge, size, edge, 0, 16]
    assert emulated_library.ragged_tile(sizes, *plan, 3 * per_member) is None


def test_no_bank_conflicts(emulated_library):
    """Chunks tile the slice; eight rows of one chunk are in different banks, and so are
    the chunks of two rows.
    """
    offset = emulated_library.library.ragged_offset
    places = {
        (row, chunk): offset(row, chunk)
        for row in range(TILE)
        for chunk in range(SLICE // CHUNK)
    }
    assert sorted(places.values()) == list(range(0, TILE * SLICE, CHUNK))
    for row in range(0, TILE, 8):
        for chunk in range(4):
            assert len({places[row + i, chunk] % 128 for i in range(8)}) == 8
    for row in range(0, TILE, 2):
        assert (
            len({places[row + i, chunk] % 128 for i in range(2) for chunk in range(4)})
            == 8
        )
