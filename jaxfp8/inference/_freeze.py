"""freeze: FP8 codes in place of kernels and fixed scales in place of histories."""

from typing import Any

from flax import linen as nn, nnx

from ..linen import _freeze as of_linen
from ..nnx import _freeze as of_nnx


def freeze(model: nn.Module | nnx.Module, *args: Any, **kwargs: Any) -> Any:
    """Freeze a model for inference: kernels become FP8 codes, inputs get fixed scales, all as in training.

        frozen = jaxfp8.freeze(model, variables, x)  # Linen: model.apply(frozen, x)
        jaxfp8.freeze(model, x)  # NNX: in place

    No code of the model changes. The other arguments are an example of what it is called with: it is traced, not run,
    to find out what each product gets.

    - The kernel of each FP8 product becomes codes, a byte each, with the contracting dimensions last, as GEMMs want
      them, and its scales. They are parameters of the product; where the kernel was no array is left.
    - With delayed scaling the input keeps the scale that its history gives now; all histories go. Inputs of other
      recipes are scaled when they come, as before.
    - Products in high precision keep their kernels. So do, in Linen, kernels that anything but FP8 products reads; in
      NNX these are gone, and who reads one gets NaN.
    - A frozen model does not train: the gradient of a frozen kernel raises. Gradients of inputs and of other
      parameters are as before.

    Products that the arguments do not reach stay as they are. `min_size` of a recipe decides here, once.

    Args:
        model: a Linen or an NNX module.
        *args: for a Linen model its variables, then the arguments of `model.apply`; for NNX those of the model. Arrays
            or `jax.ShapeDtypeStruct`; other values are static.
        **kwargs: as args; for a Linen model also `method`, `rngs` and `mutable`.

    Returns:
        The frozen variables; for NNX the model. `jax.eval_shape` of this function gives the target for restoring a
        checkpoint.

    Raises:
        TypeError: neither a Linen nor an NNX module.
        ValueError: no product to freeze; one whose history is empty; a custom quantizer with state; a Linen product
            that is called with several kernels, or in a branch of `nn.cond`; an NNX layer that computes its kernel.
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
