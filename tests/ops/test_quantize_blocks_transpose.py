"""quantize_blocks_transpose: codes and scales of both layouts, bitwise against the
oracle of each.
"""

import itertools

import numpy as np
import oracle
import pytest
from equality import assert_all_bitwise
from oracle import blocks as oracle_blocks

from jaxfp8 import ops

from . import cases
from .conftest import EACH_DTYPE
from .test_quantize_blocks import ALL_KINDS, IMPLEMENTATIONS as IMPLEMENTATIONS

# Those of the custom call, and others, for which the reference runs.
BLOCKS = pytest.mark.parametrize(
    "block", [(1, None), (1, 32), (1, 128), (128, 128), (3, 5), (None, None)], ids=str
)
F32 = np.dtype(np.float32)


def assert_layouts(got, x, fmt, block, **options):
    """One matrix."""
    one, other = (oracle_blocks.quantize(of, fmt, block, **options) for of in (x, x.T))
    assert_all_bitwise(got, (*one, *other), f"{fmt.name}, {block}, {options}")


@BLOCKS
@ALL_KINDS
@EACH_DTYPE
def test_layouts(implementation, block, options, dtype):
    """Sizes around blocks; a NaN in one block and an Inf in another."""
    shapes = (130, 70), (33, 257), *cases.EMPTY_MATRIX_SHAPES
    for fmt, (m, n) in itertools.product(cases.FORMATS, shapes):
        x = cases.random_values((m, n), dtype, m)
        if x.size:
            x[0, 0], x[-1, -1] = np.nan, np.inf
        got = ops.quantize_blocks_transpose(x, fmt.dtype, block=block, **options)
        assert_layouts(got, x, fmt, block, **options)


@pytest.mark.parametrize("block", [(1, 32), (1, None), (128, 128)], ids=str)
def test_merged_rows(implementation, block):
    x = cases.random_values((2, 3, 4, 9, 40), F32, 3)
    data, scale_inv, data_t, scale_inv_t = ops.quantize_blocks_transpose(
        x, oracle.E5M2.dtype, block=block, rows=2
    )
    assert data.shape == x.shape and data_t.shape == (2, 3, 40, 4, 9)
    for i in np.ndindex(2, 3):
        got = (
            data[i].reshape(36, 40),
            scale_inv[i],
            data_t[i].reshape(40, 36),
            scale_inv_t[i],
        )
        assert_layouts(got, x[i].reshape(36, 40), oracle.E5M2, block)
