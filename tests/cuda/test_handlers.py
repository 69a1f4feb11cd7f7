"""The FFI handlers of the CUDA library, run by XLA on the CPU over emulated kernels:
what tests/ops/test_raw_targets.py has no table for.
"""

import jax
import numpy as np
import pytest
from ops import targets
from ops.cases import run_target as run
from ops.targets import BF16, E4M3, E5M2, F32, U8

pytestmark = pytest.mark.usefixtures("handlers")

PREFIX = "emulated_cuda_"
BLOCKS = "quantize_blocks_transpose, stored"


def call(op, results, operands, **attributes):
    attributes = targets.ATTRIBUTES.get(op, {}) | attributes
    attributes = {
        name: np.bool_(v) if isinstance(v, bool) else v
        for name, v in attributes.items()
    }
    return run(targets.Call(op, operands, results, attributes), PREFIX)


def parts(op):
    """`(op, results, operands)` of a good call."""
    good = targets.good(op)
    return op, good.results, good.operands


def assert_named(op, results, operands, message, **attributes):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(op, results, operands, **attributes)


@pytest.mark.parametrize("m, n, k", [(8, 32, 48), (16, 31, 48), (16, 32, 40)])
def test_unaligned_matmul_is_refused(m, n, k):
    """Python pads; what arrives unaligned all the same is named."""
    codes = [((1, m, k), E4M3), ((1, n, k), E4M3)]
    results = [((1, m, n), F32), ((0,), U8)]
    for op, scales, attributes in (
        (
            "scaled_matmul",
            [((1,), F32)] * 2,
            {"has_bias": False, "has_accumulator": False},
        ),
        (
            "block_scaled_matmul",
            [((1, m), F32), ((1, n), F32)],
            {"a_scales": "rows", "b_scales": "rows"},
        ),
    ):
        assert_named(
            op,
            results,
            codes + scales,
            rf"\b{op}: [ab]: expected .* multiples of 16",
            **attributes,
        )


@pytest.mark.parametrize("op", ["scaled_matmul", "block_scaled_matmul"])
def test_two_e5m2_are_refused(op):
    op, results, (a, b, *scales) = parts(op)
    operands = [(a[0], E5M2), (b[0], E5M2), *scales]
    assert_named(op, results, operands, rf"\b{op}: b: expected dtype F8E4M3FN")


@pytest.mark.parametrize(
    "block, shape, wrong",
    [
        ("rows", (130, 1), (130,)),
        ("1x32", (2, 5, 512), (130, 20)),
        ("1x128", (5, 130), (130, 5)),
        ("128x128", (2, 8), (2, 5)),
    ],
)
def test_scales_lie_where_products_read_them(block, shape, wrong):
    amaxes = (1, 130 if block == "rows" else 0)
    for scales in (shape, wrong):
        results = [((1, 130, 640), E4M3), ((1, *scales), F32), (amaxes, F32)]
        operands = [np.ones((1, 130, 640), BF16)]
        if scales == shape:
            call(BLOCKS, results, operands, block=block)
            continue
        assert_named(BLOCKS, results, operands, "scale_inv: expected", block=block)


def test_matmul_scales_of_other_groups_are_named():
    specs = [((4, 16, 32), E4M3), ((4, 16, 32), E4M3), ((4, 4), F32), ((2, 4), F32)]
    message = r"b_scale_inv: expected F32\[1\] or F32\[4,4\]"
    terms = {"has_bias": False, "has_accumulator": False}
    assert_named(
        "scaled_matmul", [((4, 16, 16), F32), ((0,), U8)], specs, message, **terms
    )


def test_initialize(handlers):
    """The stage before execution, which XLA does not have on CPUs, prepares each time
    and reads no buffer.
    """
    assert handlers.initialize_scaled_matmul() == 1
    assert handlers.initialize_scaled_matmul() == 2
