"""FP8 operations: custom calls on NVIDIA GPUs and CPUs, each beside its definition in
jnp, the reference.

Codes, scales and histories of all implementations have the same bits. Products,
activations and norms agree within the bounds that their docstrings give.

Quantization multiplies by `scale`, dequantization by `scale_inv = 1 / scale`.
"""

from ._adam_update import AdamLeaf, adam_update
from ._amax import MAX_QUANTIZERS, amax, amax_to_scale, delayed_scales
from ._block_scaled_matmul import block_scaled_matmul
from ._encode_moment import MOMENT_BLOCK, decode_moment, encode_moment
from ._ffi import custom_call_targets, has_cuda_kernels
from ._quantize import Quantize, count_saturated_and_flushed, dequantize, quantize
from ._quantize_activation import (
    ACTIVATIONS,
    ClampedSwiGLU,
    activate,
    activation_grad,
    check_activation,
    is_gated,
    quantize_activation,
    quantize_activation_grad,
)
from ._quantize_blocks import quantize_blocks, quantize_blocks_transpose
from ._quantize_norm import normalize, quantize_norm
from ._quantize_pair import quantize_pair
from ._quantize_transpose import QuantizeTranspose, quantize_transpose
from ._ragged_matmul import ragged_matmul
from ._readings import (
    READING_NUMBERS,
    join_recorded,
    read_histories,
    read_rows,
    split_reading,
    write_histories,
    write_quantizers,
    write_rows,
)
from ._scaled_matmul import scaled_matmul
from ._support import implementation
from ._transpose_codes import transpose_codes
from ._undo_factors import FACTOR_TOLERANCE, undo_factors

__all__ = [
    "ACTIVATIONS",
    "ClampedSwiGLU",
    "activate",
    "amax",
    "block_scaled_matmul",
    "count_saturated_and_flushed",
    "custom_call_targets",
    "dequantize",
    "has_cuda_kernels",
    "implementation",
    "is_gated",
    "normalize",
    "quantize",
    "quantize_blocks",
    "quantize_blocks_transpose",
    "quantize_transpose",
    "ragged_matmul",
    "scaled_matmul",
]
