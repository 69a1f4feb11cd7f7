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
    recipes,
    train,
)
from .convert._model import quantize
from .dot import (
    activated,
    checkpoint_policies,
    dot_general,
    einsum,
    normalized,
    ragged_dot,
)
from .inference import calibrate, freeze
from .inspect._report import report
from .linen import Fp8DotGeneral, make_dot_general_cls
from .numerics import Format
from .recipes import (
    OVERWRITE_WITH_GRADIENT,
    ByProduct,
    CustomRecipe,
    DelayedScaling,
    DotGeneralState,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    FP8StateWarning,
    HighPrecision,
    MXFP8BlockScaling,
    QTensor,
    Quantizer,
    StaticScaling,
    autocast,
    init_state,
)
from .train import (
    accumulate_gradients,
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
    "recipes",
    "train",
    # Names.
    "ByProduct",
    "CustomRecipe",
    "DelayedScaling",
    "DotGeneralState",
    "FP8StateWarning",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "Fp8DotGeneral",
    "HighPrecision",
    "MXFP8BlockScaling",
    "OVERWRITE_WITH_GRADIENT",
    "QTensor",
    "Quantizer",
    "StaticScaling",
    "accumulate_gradients",
    "activated",
    "autocast",
    "calibrate",
    "dot_general",
    "einsum",
    "freeze",
    "grad",
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

__version__ = "0.3.0"

# `import jaxfp8.checkpoint_policies` has to work too, because `jaxfp8.dot` is not
# public.
_sys.modules[f"{__name__}.checkpoint_policies"] = checkpoint_policies


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
