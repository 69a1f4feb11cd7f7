"""Policies for `jax.checkpoint` and `nn.remat`: the arrays of an FP8 product that are
kept for the backward pass.

    nn.remat(Block, policy=jaxfp8.checkpoint_policies.save_fp8_residuals)

JAX's own `dots_saveable` and its kin see no FP8 product. The values carry names
instead, for `jax.checkpoint_policies`: `RESIDUAL_NAME` is on the FP8 codes of input and
kernel, their scales and next states, `OUTPUT_NAME` on results. What has `RESIDUAL_NAME`
also has `"te_quantization"`, MaxText's name for the codes of TransformerEngine.
"""

from collections.abc import Callable
from typing import Any

import jax

from ._fused_input import RESIDUAL_NAME as RESIDUAL_NAME
from ._product import OUTPUT_NAME as OUTPUT_NAME

__all__ = [
    "OUTPUT_NAME",
    "RESIDUAL_NAME",
    "save_fp8_residuals",
    "save_fp8_residuals_and_gemm_outputs",
    "save_gemm_outputs",
]

# Keep the FP8 codes that the backward GEMMs read: one byte for each element of input
# and kernel. Where the result itself is needed again, for a nonlinearity after it, the
# operands are quantized and multiplied once more.
save_fp8_residuals: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(
    RESIDUAL_NAME
)

# Keep the results: the operands are quantized once more, and not multiplied.
save_gemm_outputs: Callable[..., Any] = jax.checkpoint_policies.save_only_these_names(
    OUTPUT_NAME
)

# Keep both: no part of a product runs again.
save_fp8_residuals_and_gemm_outputs: Callable[..., Any] = (
    jax.checkpoint_policies.save_only_these_names(RESIDUAL_NAME, OUTPUT_NAME)
)
