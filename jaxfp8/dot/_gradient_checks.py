"""Check that a gradient through a product has the sources of its codes and the state of its recipe."""

import jax

from .._jax import _warnings
from ..numerics import FP8_DTYPES
from ..recipes import FP8StateWarning
from ._gemms import Product

_NOT_UPDATED = (
    "this gradient never updates FP8 state: it is not taken with respect to the state, so all scales stay as they are. "
    "Differentiate with respect to `_overwrite_with_gradient` (or the DotGeneralState) too, and store that gradient as "
    "the next state; in NNX take jaxfp8.nnx.value_and_grad and jaxfp8.nnx.Optimizer"
)
_NO_STATE = (
    "the recipe of this layer keeps state, but the variables have none: the layer trains with scales of the tensors "
    "at hand. Pass all variables that `init` returned, `_overwrite_with_gradient` too (in a TrainState: "
    "jaxfp8.linen.TrainState.create(params=variables, ...)); or take Float8CurrentScaling"
)


def warn_of_state(quantizers, is_updated, layer: str | None = None) -> None:
    """Warn where a gradient leaves out the state of a product, or a layer lacks the state that its recipe keeps.

    Args:
        quantizers: the quantizers of the product.
        is_updated: for each leaf of the state, whether the gradient is taken with respect to that leaf.
        layer: the path of the layer; None for a function, whose state is an argument.
    """
    message = None
    if is_updated and not any(is_updated):
        message = _NOT_UPDATED
    elif layer is not None and not is_updated and any(jax.tree.leaves(quantizer.init()) for quantizer in quantizers):
        message = _NO_STATE
    if message:
        _warnings.warn(f"{layer}: {message}" if layer else message, FP8StateWarning)


def check_sources(product: Product, operands, is_differentiated) -> None:
    """Raise a TypeError where the gradient is taken with respect to a QTensor without a source."""
    for name, operand, differentiated in zip(product.names, operands, is_differentiated, strict=False):
        if operand.dtype in FP8_DTYPES and differentiated:
            raise TypeError(
                f"{name}: a QTensor without its source has no gradient; see jaxfp8.quantize_params. A model of "
                "jaxfp8.freeze does not train: train the variables it was frozen from, or differentiate with respect "
                "to other variables than its kernels"
            )
