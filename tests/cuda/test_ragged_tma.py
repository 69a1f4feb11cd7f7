"""The ragged product of Hopper's copy engine (`cuda/kernels/ragged_tma.cu`) as
interpreted PTX: the bits of the default kernel, of which `test_emulated_ragged.py` has
those of the model.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from oracle import BF16, E4M3, E5M2, F32, assert_bitwise

from jaxfp8 import ops

from . import test_emulated_ragged as ragged
from .ptx import machine

KERNEL = "RaggedTmaKernel"
CASES = pytest.mark.parametrize(
    "contraction, precise, backwards",
    [
        (False, True, False),
        (False, False, True),
        (True, True, True),
        (True, False, False),
    ],
    ids=["rows precise", "rows", "contraction precise", "contraction"],
)


@pytest.fixture(scope="module")
def launchers():
    return machine.launchers()


@pytest.fixture
def kernels(launchers):
    yield launchers
    launchers.configure()


@CASES
def test_bits(kernels, contraction, precise, backwards):
    """Groups of none, of one, of a tile and around it; more slices than stages; two
    tiles of columns; NaN beyond the last group.
    """
    # On two multiprocessors blocks have several tiles; copies arrive in either order.
    kernels.configure(2 if backwards else 132, backwards)
    if contraction:
        sizes, shape, formats = [1, 0, 127, 600, 130, 5], (880, 130, 24), (E4M3, E5M2)
        position = ..., slice(870, None)
    else:
        n = 200 if precise else 264  # more than one tile
        sizes, shape, formats = [1, 0, 131, 128], (266, 656, n), (E5M2, E4M3)
        position = ..., slice(260, None), slice(None)
    m, k, n = shape
    a, b = ragged.operands(contraction, len(sizes), m, k, n, *formats)
    for x in (a, b) if contraction else (a,):
        x[position] = np.nan
    operands = a, b, ragged.A_INV, ragged.B_INV, np.int32([sizes])
    options = {"precise": precise, "out_dtype": F32 if precise else BF16}
    launched = machine.launched(kernels.library, KERNEL)
    got = kernels.ragged_matmul(*operands, tma=True, **options)
    assert machine.launched(kernels.library, KERNEL) == launched + 1
    assert_bitwise(got, kernels.ragged_matmul(*operands, **options), "the default's")


def test_scales_and_matrices_of_members(kernels):
    """Two products in one call, rows that are not whole pieces of 16 bytes, and an
    empty group at either end.
    """
    kernels.configure()
    kernels.device = ragged.DEVICES["warpgroups"][0]
    a, b = ragged.operands(False, 3, 70, 144, 21, b_fmt=E4M3, members=2)
    scales = F32([0.5, 3]), F32([0.25, 7])
    ragged.check(kernels, a, b, [[0, 60, 3], [9, 61, 0]], *scales, tma=True)


@pytest.mark.parametrize("k, shift", [(136, 0), (144, 1)], ids=["k", "alignment"])
def test_what_has_no_map(kernels, k, shift):
    """The default runs where rows are not whole chunks on their boundary."""
    kernels.configure()
    kernels.device = ragged.DEVICES["warpgroups"][0]
    launched = machine.launched(kernels.library, KERNEL)
    a, b = ragged.operands(False, 1, 9, k, 8)
    ragged.check(kernels, a, b, [9], shift=shift, tma=True)
    assert machine.launched(kernels.library, KERNEL) == launched


@pytest.mark.parametrize("value, count", [("1", 1), ("0", 0), (None, 0)])
def test_the_environment_chooses(monkeypatch, value, count):
    """The default kernel runs unless `JAXFP8_RAGGED_TMA` is 1."""
    library = machine.register_handlers(machine.ARCHITECTURE)
    if value is None:
        monkeypatch.delenv("JAXFP8_RAGGED_TMA", raising=False)
    else:
        monkeypatch.setenv("JAXFP8_RAGGED_TMA", value)
    a, b = ragged.operands(False, 2, 9, 32, 16, b_fmt=E4M3)
    sizes, launched = jnp.int32([4, 5]), machine.launched(library, KERNEL)
    with machine.ops():
        ops.ragged_matmul(a[0], b[0], F32(1), F32(1), sizes).block_until_ready()
    assert machine.launched(library, KERNEL) == launched + count
