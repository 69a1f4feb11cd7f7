"""FP8 training for JAX and Flax.

    nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)

`scale` multiplies to quantize, `scale_inv = 1 / scale` multiplies to dequantize. The
state of a quantizer stores `scale_inv`, under the name `scale`, which Flax gave it.
"""

import sys as _sys

from . import (
    collectives,
    convert,
    inference,
    inspect,
    integrations,
    linen,
    mixed_precision,
    nnx,
    ops,
    optim,
    train,
)
from .dot import (
    activated,
    checkpoint_policies,
    dot_general,
    einsum,
    normalized,
    ragged_dot,
)
from .inference import calibrate, freeze
from .inspect._report import Report, report
from .integrations._quantize import quantize
from .linen import Fp8DotGeneral, make_dot_general_cls
from .numerics import E4M3, E5M2, HYBRID, Format
from .ops._ffi import has_cuda_kernels
from .recipes import (
    OVERWRITE_WITH_GRADIENT,
    ByProduct,
    CustomRecipe,
    DelayedScaling,
    DelayedScalingQuantizer,
    DotGeneralState,
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer,
    Float8RowwiseScaling,
    FP8StateWarning,
    GEMMType,
    HighPrecision,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    QTensor,
    Quantizer,
    QuantizerState,
    StaticScaling,
    StaticScalingQuantizer,
    autocast,
    init_state,
)
from .train import (
    accumulate_gradients,
    fork,
    grad,
    max_grad,
    quantize_params,
    update_state,
    value_and_grad,
)

__all__ = [
    # Modules.
    "checkpoint_policies",
    "collectives",
    "convert",
    "inference",
    "inspect",
    "integrations",
    "linen",
    "mixed_precision",
    "nnx",
    "ops",
    "optim",
    "train",
    # Names.
    "ByProduct",
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingQuantizer",
    "DotGeneralState",
    "E4M3",
    "E5M2",
    "FP8StateWarning",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8RowwiseQuantizer",
    "Float8RowwiseScaling",
    "Format",
    "Fp8DotGeneral",
    "GEMMType",
    "HYBRID",
    "HighPrecision",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "OVERWRITE_WITH_GRADIENT",
    "QTensor",
    "Quantizer",
    "QuantizerState",
    "Report",
    "StaticScaling",
    "StaticScalingQuantizer",
    "accumulate_gradients",
    "activated",
    "autocast",
    "calibrate",
    "dot_general",
    "einsum",
    "fork",
    "freeze",
    "grad",
    "has_cuda_kernels",
    "init_state",
    "make_dot_general_cls",
    "max_grad",
    "normalized",
    "quantize",
    "quantize_params",
    "ragged_dot",
    "report",
    "update_state",
    "value_and_grad",
]

__version__ = "0.2.0"

# `import jaxfp8.checkpoint_policies` has to work too, because `jaxfp8.dot` is not
# public.
_sys.modules[f"{__name__}.checkpoint_policies"] = checkpoint_policies
