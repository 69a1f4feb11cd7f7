"""The ragged product of Hopper's copy engine (`cuda/kernels/ragged_tma.cu`) as
interpreted PTX: the bits of the oracle and of the kernel that is the default.
"""

import numpy as np
import oracle
import pytest
from oracle import BF16, E4M3, E5M2, F32, accumulation, assert_bitwise

from . import test_emulated_ragged as ragged
from .ptx import machine

# Groups of one row, of none, of a tile and around it; the last rows are of no group.
SIZES = [1, 0, 127, 128, 130, 5]


@pytest.fixture(scope="module")
def launchers():
    if reason := machine.why_not():
        pytest.skip(reason)
    return machine.Interpreted(machine.build())


@pytest.fixture(params=[(132, False), (2, True)], ids=["132", "2-backwards"])
def kernels(launchers, request):
    """On devices of two sizes, so that grids loop; warps and copies in either order."""
    launchers.configure(*request.param)
    yield launchers
    launchers.configure()


def multiply(kernels, a, b, sizes, **options):
    before = machine.launched(kernels.library, "RaggedTmaKernel")
    got = kernels.ragged_matmul(
        a, b, ragged.A_INV, ragged.B_INV, np.int32([sizes]), tma=True, **options
    )
    assert machine.launched(kernels.library, "RaggedTmaKernel") == before + 1
    return got


def expected(a, b, sizes, precise):
    """Sums of 32 products as Hopper's tensor cores make them, in turn."""
    promotion = 128 if precise else None
    out = np.zeros((a.shape[1], b.shape[2]), F32)
    for group, (begin, end) in enumerate(oracle.group_ranges(sizes)):
        out[begin:end] = accumulation.tensor_core_matmul(
            a[0, begin:end], b[0, group], step=32, promotion=promotion
        )
    return out * (ragged.A_INV * ragged.B_INV)


@pytest.mark.parametrize(
    "precise, a_fmt, k, n, out_dtype",
    [(True, E4M3, 720, 200, F32), (False, E5M2, 656, 264, BF16)],
    ids=["precise", "fast"],
)
def test_bits(kernels, precise, a_fmt, k, n, out_dtype):
    """More slices than stages, the last one shorter; two tiles of columns."""
    a, b = ragged.operands(False, len(SIZES), 400, k, n, a_fmt, E4M3)
    options = {"precise": precise, "out_dtype": out_dtype}
    got = multiply(kernels, a, b, SIZES, **options)
    assert_bitwise(got[0], expected(a, b, SIZES, precise).astype(out_dtype), "oracle")
    today = kernels.ragged_matmul(
        a, b, ragged.A_INV, ragged.B_INV, np.int32([SIZES]), **options
    )
    assert_bitwise(got, today, "today's kernel")
