"""Readers who come from PyTorch's AMP, TransformerEngine or XLA's guide to FP8 find the
terms of their documents.
"""

import pytest
import snippets

TERMS = {
    "PyTorch's AMP": """autocast GradScaler init_scale growth_factor backoff_factor
        growth_interval unscale_ new_scale clip_grad_norm_ found_inf get_scale
        allow_tf32 FP16 BF16 TF32 underflow overflow DDP FSDP""",
    "TransformerEngine": """fp8_autocast DelayedScaling margin interval=1
        amax_history_len amax_compute_algo most_recent HYBRID reduce_amax
        amax_reduction_group is_first_microbatch te.Linear LayerNormLinear LayerNormMLP
        per-tensor tensor-wise block-wise CustomRecipe qfactory linear_grad_input
        Float8Quantizer QuantizedTensor quantize_impl rowwise columnwise data_t
        original_shape qgemm m_params GEMMType fp8_output""",
    "XLA": """Fp8DotGeneralOp overwrite_with_gradient OverwriteWithGrad fp32_max_grad
        in_qdq Q-DQ epilogue""",
}


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_terms_are_on_a_page(terms):
    text = " ".join((snippets.ROOT / page).read_text() for page in snippets.pages())
    assert [term for term in terms.split() if term not in text] == []
