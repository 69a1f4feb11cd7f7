"""Forward and backward of a Dense of 8192^3 on a B200: launches, bytes and FP8 products
of the recipes with blocks.

Powers of two that scale 128 elements each become scales of 32 there: a launch for each
of the six operands.
"""

import pytest

GROUP = "blackwell"
GPU = "b200"
CASE = "dense by recipe"
MIB = 2**20
GOALS = {
    # recipe: (launches, MiB)
    "delayed": (8, 896),
    "block, power of two": (12, 924),
    "MXFP8": (6, 908),
}


@pytest.mark.parametrize("recipe", GOALS)
def test_products_are_fp8(counts, recipe):
    found = counts[CASE][recipe]
    (launches, mib) = GOALS[recipe]
    assert (found["gemms"], found["fp8_gemms"]) == (3, 3)
    assert found["launches"] <= launches, found["kinds"]
    assert found["bytes"] <= (mib + 1) * MIB
    # Quantization and products are one custom call each; delayed scaling has two more
    # for its state.
    assert found["kinds"]["custom-call"] == (8 if recipe == "delayed" else 6)
    assert found["copies"] == 0


def test_other_scales_have_no_product(counts):
    """The control: scales of blocks that are no powers of two are multiplied by the
    reference.
    """
    assert counts[CASE]["block"]["fp8_gemms"] == 0
