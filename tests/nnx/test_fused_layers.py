"""nnx.GatedMLP, NormDense and Linear of several dimensions: the Linen layers' numbers,
in NNX's own training.
"""

import pytest
from linen.test_fused_layers import BF16, F32, LAYERS, WIDTH, inputs
from parametrize import each_row

from .cases import compare_with_linen


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@each_row("layer", LAYERS)
def test_linen_and_nnx_agree(layer, dtype):
    compare_with_linen(layer.clone(dtype=dtype), WIDTH, inputs(dtype))
