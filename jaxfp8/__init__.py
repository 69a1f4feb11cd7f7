"""FP8 training for JAX and Flax.

    nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)

`scale` multiplies to quantize, `scale_inv = 1 / scale` multiplies to dequantize. The
state of a quantizer stores `scale_inv`, under the name `scale`, which Flax gave it.
"""

import sys as _sys

from . import (
    collectives as collectives,
    convert as convert,
    inference as inference,
    inspect as inspect,
    integrations as integrations,
    linen as linen,
    mixed_precision as mixed_precision,
    nnx as nnx,
    ops as ops,
    optim as optim,
    train as train,
)
from .dot import (
    activated as activated,
    checkpoint_policies as checkpoint_policies,
    dot_general as dot_general,
    einsum as einsum,
    normalized as normalized,
    ragged_dot as ragged_dot,
)
from .inference import calibrate as calibrate, freeze as freeze
from .inspect._report import Report as Report, report as report
from .linen import (
    Fp8DotGeneral as Fp8DotGeneral,
    make_dot_general_cls as make_dot_general_cls,
)
from .numerics import E4M3 as E4M3, E5M2 as E5M2, HYBRID as HYBRID, Format as Format
from .ops._ffi import has_cuda_kernels as has_cuda_kernels
from .recipes import (
    OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT,
    ByProduct as ByProduct,
    CustomRecipe as CustomRecipe,
    DelayedScaling as DelayedScaling,
    DelayedScalingQuantizer as DelayedScalingQuantizer,
    DotGeneralState as DotGeneralState,
    Float8BlockQuantizer as Float8BlockQuantizer,
    Float8BlockScaling as Float8BlockScaling,
    Float8CurrentScaling as Float8CurrentScaling,
    Float8CurrentScalingQuantizer as Float8CurrentScalingQuantizer,
    Float8RowwiseQuantizer as Float8RowwiseQuantizer,
    Float8RowwiseScaling as Float8RowwiseScaling,
    FP8StateWarning as FP8StateWarning,
    GEMMType as GEMMType,
    HighPrecision as HighPrecision,
    MXFP8BlockScaling as MXFP8BlockScaling,
    MXFP8Quantizer as MXFP8Quantizer,
    QTensor as QTensor,
    Quantizer as Quantizer,
    QuantizerState as QuantizerState,
    StaticScaling as StaticScaling,
    StaticScalingQuantizer as StaticScalingQuantizer,
    autocast as autocast,
    init_state as init_state,
)
from .rules import quantize as quantize
from .train import (
    accumulate_gradients as accumulate_gradients,
    fork as fork,
    grad as grad,
    max_grad as max_grad,
    quantize_params as quantize_params,
    update_state as update_state,
    value_and_grad as value_and_grad,
)

__version__ = "0.2.0"

# `import jaxfp8.checkpoint_policies` has to work too, because `jaxfp8.dot` is not
# public.
_sys.modules[f"{__name__}.checkpoint_policies"] = checkpoint_policies
