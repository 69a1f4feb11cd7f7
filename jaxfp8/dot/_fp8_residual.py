"""Inputs of activations and norms as FP8, for the backward alone: one byte an element in place of two or four."""

import jax
from jax.ad_checkpoint import checkpoint_name

from ..numerics import E4M3
from ..recipes import Float8CurrentScalingQuantizer, OperandOptions, QTensor

# Name for rematerialization policies (checkpoint_policies.py).
RESIDUAL_NAME = "jaxfp8_residual"


def compressed(x: jax.Array) -> QTensor:
    """Quantize x to e4m3 with a power of two as the scale, from the amax of x and without state.

    Inside `shard_map` each device has a scale of its own, because the codes never leave the device.
    """
    quantizer = Float8CurrentScalingQuantizer(E4M3.dtype, power_2_scale=True)
    q, _ = quantizer.quantize_operand(x, None, OperandOptions(rows=x.ndim - 1, columnwise=False))
    return checkpoint_name(q, RESIDUAL_NAME)
