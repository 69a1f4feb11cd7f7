"""freeze: FP8 codes in place of kernels and fixed scales in place of histories."""

from typing import Any

from flax import linen as nn, nnx

from ..linen import _freeze as of_linen
from ..nnx import _freeze as of_nnx


def freeze(model: nn.Module | nnx.Module, *args: Any, **kwargs: Any) -> Any:
    """Freeze a model for inference: kernels become FP8 codes and inputs get fixed scales, with the values of training.

        frozen = jaxfp8.freeze(model, variables, x)  # Linen: model.apply(frozen, x)
        jaxfp8.freeze(model, x)  # NNX: in place

    The code of the model does not change. The arguments after model and variables are an example of a call, which is
    traced to find the operands of each product.

    - The kernel of each FP8 product becomes codes, a byte each, with the contracting dimensions last, as GEMMs read
      them, and scales. Codes and scales are parameters of the product; a placeholder without an array replaces the
      kernel.
    - With delayed scaling the input keeps the scale that its history gives now, and all histories are dropped. Inputs
      of other recipes are scaled when they arrive, as before.
    - Products in high precision keep their kernels. In Linen a kernel also stays if anything but FP8 products reads it;
      in NNX such a reader gets NaN.
    - A frozen model does not train: the gradient of a frozen kernel raises. Gradients of inputs and of other
      parameters are as before.

    Products that the example does not reach stay as they are. The `min_size` of a recipe is applied to the sizes of the
    example, once.

    Args:
        model: a Linen or an NNX module.
        *args: for a Linen model its variables, then the arguments of `model.apply`; for an NNX model its arguments.
            Arrays or `jax.ShapeDtypeStruct`; other values are static.
        **kwargs: keyword arguments of that call; for a Linen model also `method`, `rngs` and `mutable`.

    Returns:
        The frozen variables; for NNX `model`, changed in place. `jax.eval_shape` of this function gives the target for
        restoring a checkpoint.

    Raises:
        TypeError: `model` is neither a Linen nor an NNX module, or a Linen model comes without variables.
        ValueError: there is no product to freeze; a product has an empty history, or a custom quantizer with state; a
            Linen product is called with several kernels, or in a branch of `nn.cond`; an NNX layer computes its kernel.
    """
    if isinstance(model, nn.Module):
        if not args:
            raise TypeError("freeze: expected freeze(model, variables, *args) for a Linen model, got no variables")
        variables, *args = args
        return of_linen.freeze(model, variables, args, kwargs)
    if isinstance(model, nnx.Module):
        return of_nnx.freeze(model, args, kwargs)
    raise TypeError(
        f"freeze: model: expected a Linen or an NNX module, got {type(model).__name__}; in plain functions "
        "jaxfp8.quantize_params gives the codes of kernels"
    )
