"""FP8 training for JAX and Flax.

    nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)

`scale` multiplies to quantize, `scale_inv = 1 / scale` multiplies to dequantize. What Flax stores under the name
`scale`, and state here with it, is `scale_inv`.
"""

from . import (
    _plan_files,
    checkpoint_policies as checkpoint_policies,
    convert as convert,
    inference as inference,
    inspect as inspect,
    integrations as integrations,
    linen as linen,
    mixed_precision as mixed_precision,
    nnx as nnx,
    ops as ops,
    train as train,
)
from ._autocast import autocast as autocast
from ._autotune import AutotuneReport as AutotuneReport, autotune as autotune
from ._dot_general import dot_general as dot_general
from ._einsum import einsum as einsum
from ._fused_input import activated as activated, normalized as normalized
from ._quantize_params import quantize_params as quantize_params
from ._ragged_dot import ragged_dot as ragged_dot
from ._report import Report as Report, report as report
from ._sharing import fork as fork, grad as grad, max_grad as max_grad, value_and_grad as value_and_grad
from ._state_tree import OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT
from ._warning import FP8StateWarning as FP8StateWarning
from .formats import E4M3 as E4M3, E5M2 as E5M2, HYBRID as HYBRID, Format as Format
from .inference import calibrate as calibrate, freeze as freeze
from .linen import Fp8DotGeneral as Fp8DotGeneral
from .ops._ffi import has_cuda_kernels as has_cuda_kernels
from .recipes import (
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
    GEMMType as GEMMType,
    HighPrecision as HighPrecision,
    MXFP8BlockScaling as MXFP8BlockScaling,
    MXFP8Quantizer as MXFP8Quantizer,
    Quantizer as Quantizer,
    QuantizerState as QuantizerState,
    init_state as init_state,
)
from .tensor import QTensor as QTensor
from .train import accumulate_gradients as accumulate_gradients, update_state as update_state

# Not when a product is lowered: programs from a cache or an export, which never are, use the plans too.
if has_cuda_kernels():
    _plan_files.store.load()
