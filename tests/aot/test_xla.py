"""implementation("xla") on H200s: every product is one that XLA rewrote to cuBLASLt's
FP8, with unrounded scales.
"""

import pytest

from .native_xla import CASES, GROUPS, SHARDED, K, N

PROGRAM = "native_xla"


@pytest.mark.parametrize("case", [*CASES, *SHARDED])
def test_three_fp8_products_and_nothing_else(report, case):
    found, products = report[case], report[case]["products"]
    assert found["targets"] == {"__cublas$lt$matmul$f8": 3}, found
    assert found["gemms"] == found["fp8_gemms"] == 3
    # fprop is fast, dgrad and wgrad are precise, as the recipe has it
    precisions = [product["precision"] for product in products]
    assert sorted(precisions) == ["DEFAULT", "HIGHEST", "HIGHEST"]
    # Although the pattern is in bfloat16, where XLA of itself rounds scales, as in
    # Flax's program.
    assert not any(any(product["rounded_scales"]) for product in products)
    assert all(any(product["rounded_scales"]) for product in report["flax"]["products"])
    # No product is written in f32 to be converted: but for members, whose scales XLA
    # does not take, and for an f32 kernel's gradient.
    in_f32 = {"dot_general in f32": 3, "members": 3}
    expected = in_f32.get(case, 1 if case.startswith(("Dense", "FSDP Dense")) else 0)
    assert [product["out"] for product in products].count("f32") == expected


@pytest.mark.parametrize(
    "case", ["Dense with bias", "nnx.Linear", "FSDP Dense with bias"]
)
def test_a_bias_is_added_in_the_product(report, case):
    products = report[case]["products"]
    assert [
        product["epilogue"] for product in products if product["precision"] == "DEFAULT"
    ] == ["BIAS"]
    assert {
        product["epilogue"] for product in products if product["precision"] == "HIGHEST"
    } == {"DEFAULT"}


@pytest.mark.parametrize("case", SHARDED)
def test_kernels_are_gathered_as_codes(report, case):
    """Once, a byte an element, for fprop and dgrad."""
    gathers = [c for c in report[case]["collectives"] if c["kind"] == "all-gather"]
    assert [(c["dtypes"], c["bytes"]) for c in gathers] == [(["f8e4m3fn"], K * N)]


def test_members(report):
    """A scale for each kernel: one product of all of them, which the scales then
    multiply in f32.
    """
    assert report["members"]["gemms"] == 3 < GROUPS
