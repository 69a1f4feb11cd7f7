"""A mixture of experts' product on an H200: three custom calls, nothing of the size of
all experts times all rows. And a layer of experts: its launches and its memory.
"""

from .experts import EXPERTS, HIDDEN, ROWS, WIDTH

PROGRAM = "experts"


def test_three_products_and_three_quantizations(report):
    calls = report["fp8"]["custom_calls"]
    assert calls["ragged_matmul"] == 3
    assert calls["quantize_transpose"] == 3 and "quantize" not in calls
    assert report["fp8"]["gemms"] == 3 and not report["fp8"]["loops"]


def test_three_products_of_blocks(report):
    """No loop of the reference. Beside the calls there are the sum of the sizes and the
    masks of x and of the gradient: no scale is put in another order.
    """
    found = report["blocks"]
    assert found["kinds"] == {"custom-call": 6, "fusion": 3} and not found["loops"]
    assert found["custom_calls"] == {"ragged_matmul": 3, "quantize_blocks_transpose": 3}


def test_nothing_is_dense_in_groups(report):
    """XLA's own ragged product copies the rows for each group; ours has no array larger
    than an operand.
    """
    assert report["bf16"]["largest"] >= EXPERTS * ROWS * WIDTH
    assert report["fp8"]["largest"] == max(EXPERTS * WIDTH * HIDDEN, ROWS * HIDDEN)
    # Codes of all operands in both layouts, the masked copies of x and of the gradient
    # in bf16, and scales.
    codes = 2 * (ROWS * WIDTH + EXPERTS * WIDTH * HIDDEN + ROWS * HIDDEN)
    masked = 2 * (ROWS * WIDTH + ROWS * HIDDEN)
    assert report["fp8"]["temporary_bytes"] <= codes + masked + 2**20, report


def test_one_gather_of_codes(report):
    """FSDP over rows and kernels: one gather of codes for y and dlhs, half of
    bfloat16's bytes, and nothing of rows.
    """
    sent = [c for c in report["fsdp"]["collectives"] if c["bytes"] > 1024]
    kinds = sorted(c["kind"] for c in sent)
    assert kinds in (["all-gather", "all-reduce"], ["all-gather", "reduce-scatter"]), (
        sent
    )
    (gather,) = (c for c in sent if c["kind"] == "all-gather")
    assert gather["bytes"] == EXPERTS * WIDTH * HIDDEN, gather


def test_a_layer(report):
    """Forward and backward of a layer with the router's work left out: the products of
    XLA copy the rows for each expert.
    """
    layer, bf16 = report["fp8 layer"], report["bf16 layer"]
    assert layer["fp8_gemms"] == 6 and bf16["fp8_gemms"] == 0
    assert layer["launches"] <= 24, layer["kinds"]
    assert layer["temporary_bytes"] <= 0.10 * bf16["temporary_bytes"], report
