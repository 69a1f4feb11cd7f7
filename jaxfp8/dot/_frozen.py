"""Frozen products: a kernel that is stored as codes and, with delayed scaling, an input
with a fixed scale.

`freeze_operands` turns a kernel and a state into the arrays that inference needs;
`multiply` is `jaxfp8.dot_general` with these arrays: it multiplies by the same codes
and scales as with that kernel and that state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import recipes
from ..ops import _checks
from ..recipes import _state_tree
from . import _dot_general
from ._compute_dtype import promoted
from ._layout import checked_numbers, layouts

KERNEL = "kernel"
KERNEL_SCALE_INV = "kernel_scale_inv"
INPUT_SCALE = "input_scale"
INPUT_SCALE_INV = "input_scale_inv"

# The quantizers that `freeze` gives fixed scales, by their names in Flax's variables.
_FIXED = ("input", "kernel", "linear_input", "linear_weight")


def freeze_operands(
    x_shape, kernel, dimension_numbers, recipe, state
) -> dict[str, jax.Array] | None:
    """Return the arrays that inference needs of a product's kernel and state.

    Args:
        x_shape: the shape of x. The recipe's `min_size` decides by this shape whether
            the product is frozen; a frozen product is FP8 for x of any size.
        kernel: bfloat16, float16 or float32, as the product gets it.
        dimension_numbers, recipe, state: see `jaxfp8.dot_general`.

    Returns:
        A dict, or None where the product or its kernel is in high precision. `kernel`:
        the codes with the contracting dimensions last, as GEMMs read them,
        `[*batch, *free, *contract]`. `kernel_scale_inv`: f32 `(1,)`, or the scale of
        each block, f32 or float8_e8m0fnu. `input_scale` and `input_scale_inv`: f32
        `(1,)`, with delayed scaling that has state.

    Raises:
        ValueError: x, the output or the kernel has a quantizer with state, other than
            delayed scaling of x and kernel.
    """
    kernel = _checks.high_precision("freeze", "kernel", kernel)
    # 1. Read the state. A model with rules applies `max_grad` itself; frozen scales are
    #    plain float32.
    quantizers, state = _dot_general.checked_quantizers(
        "freeze", recipe, recipes.without_max(state)
    )
    numbers = checked_numbers(dimension_numbers, x_shape, kernel.shape)
    both = layouts(x_shape, kernel.shape, numbers)
    if 0 in kernel.shape or _dot_general.why_not_fp8(recipe, both):
        return None
    if jax.tree.leaves(state.output):
        raise ValueError(
            f"freeze: recipe: expected an output without state, got "
            f"{quantizers.output!r}"
        )
    scales = recipes.scales_of(quantizers, recipes.read(quantizers, state))
    # 2. Quantize the kernel.
    q = _quantized(
        kernel,
        quantizers.kernel,
        both[1],
        scales.kernel,
        recipes.AmaxReduction.for_recipe(recipe),
    )
    if q.scale_inv is None:  # the recipe keeps the kernel in high precision
        return None
    # 3. Fix the scales of the input and the kernel.
    fixed = quantizers.input.fixed_scale("freeze: recipe: for the input", scales.input)
    # the codes keep that scale
    quantizers.kernel.fixed_scale("freeze: recipe: for the kernel", scales.kernel)
    frozen = {KERNEL: q.data, KERNEL_SCALE_INV: q.scale_inv}
    if fixed is not None:
        frozen |= {INPUT_SCALE: fixed.scale, INPUT_SCALE_INV: fixed.scale_inv}
    return frozen


def _types(q) -> dict[str, str]:
    arrays = {KERNEL: q.data, KERNEL_SCALE_INV: q.scale_inv}
    return jax.tree.map(lambda x: f"{x.dtype.name}{list(x.shape)}", arrays)


def _quantized(kernel, quantizer, layout, scale, reduce) -> recipes.QTensor:
    """Quantize the kernel as the first product reads it."""
    first = layout.contract_first
    options = layout.options(first, reduce)
    q, _ = quantizer.quantize_operand(layout.ordered(kernel), scale, options)
    return q.transposed(len(layout.batch)) if first else q


def multiply(
    frozen,
    x,
    kernel,
    dimension_numbers,
    *,
    recipe,
    preferred_element_type,
    by: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    """Compute `jaxfp8.dot_general` with a frozen kernel: its codes are the kernel, and
    the state has fixed scales.

    Args:
        frozen: the result of `freeze_operands` for the kernel.
        x: the input.
        kernel: an array of the shape and the dtype that the kernel had; its values are
            not read.
        dimension_numbers: those of the product of x and that kernel.
        recipe: the recipe of the product; None dequantizes the codes.
        preferred_element_type: the dtype of the result; None is the dtype that x and
            that kernel promote to.
        by: `jaxfp8.dot_general`, or a function of the same arguments.
        options: further arguments of `jaxfp8.dot_general`.

    Raises:
        ValueError: `frozen` was made with another recipe, or from a kernel of another
            shape.
    """
    # 1. Read the layouts. Codes are `[*batch, *free, *contract]`, whatever the kernel's
    #    own order.
    numbers = checked_numbers(dimension_numbers, x.shape, kernel.shape)
    x_layout, kernel_layout = layouts(x.shape, kernel.shape, numbers)
    batch, contract = len(kernel_layout.batch), len(kernel_layout.contract)
    codes = recipes.QTensor(frozen[KERNEL], frozen[KERNEL_SCALE_INV], cols=contract)
    last = tuple(range(codes.ndim - contract, codes.ndim))
    numbers = (x_layout.contract, last), (x_layout.batch, tuple(range(batch)))
    # 2. Describe the scales of the codes, and the fixed scale of x, for the recipe.
    fixed = None
    if recipe is not None:
        codes = _with_blocks(codes, kernel, kernel_layout, recipe)
        if INPUT_SCALE in frozen:
            # Both numbers: 1 / (1 / scale) may be another number than the scale.
            fixed = recipes.Scale(frozen[INPUT_SCALE], frozen[INPUT_SCALE_INV], None)
        recipe = dataclasses.replace(recipe, min_size=0, fp8_residuals=False)
    if preferred_element_type is None:
        preferred_element_type = promoted(x.dtype, kernel.dtype)
    return by(
        x,
        codes,
        numbers,
        recipe=recipe,
        state=recipes.DotGeneralState(fixed, None, None),
        preferred_element_type=preferred_element_type,
        **options,
    )


def _with_blocks(codes, kernel, layout, recipe) -> recipes.QTensor:
    """Return the codes of a kernel with the blocks of the scales that the recipe gives
    it; raise where it gives others.
    """

    def quantized(kernel):
        return _quantized(
            kernel, recipe.quantizers().kernel, layout, None, recipes.no_reduction
        )

    q = jax.eval_shape(quantized, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
    needed, got = _types(q), _types(codes)
    if got != needed:
        raise ValueError(
            f"frozen product: the recipe here is {recipe!r} with {needed}, but the "
            f"frozen arrays {got} are of another recipe, or were cast; run the model "
            "with the recipes (jaxfp8.autocast, rules) that it was frozen with, and "
            "keep casts to other parameters"
        )
    return dataclasses.replace(codes, block=q.block, power_2_scale=q.power_2_scale)


class Placeholder:
    """The base of placeholders for a removed kernel, with its `shape` and `dtype`."""

    def get_value(self) -> jax.Array:
        """Return NaNs, so that any read outside of the frozen product shows."""
        return jnp.full(self.shape, jnp.nan, self.dtype)

    @property
    def __jax_array__(self):
        # JAX asks for this attribute wherever it expects an array
        raise ValueError(
            "frozen kernel: expected an array, got the placeholder that jaxfp8.freeze "
            "leaves of a kernel whose codes are in its FP8 product; give the input to "
            "that product or layer, or take the variables from before freeze"
        )


def nothing_to_freeze() -> ValueError:
    """Make the error of a model without FP8 products."""
    return ValueError(
        "freeze: model: expected FP8 products that are not frozen yet, found none for "
        "these arguments; jaxfp8.report says what runs where"
    )


def refuse_untouched(state) -> None:
    """Raise where a quantizer of inputs or kernels in a tree of state has no amax and
    no scale: its fixed scale would be that of no tensor. Not while it is traced.
    """
    for quantizer in _state_tree.flatten(state).quantizers:
        history, scale_inv = quantizer.leaves
        is_fixed = quantizer.name.rpartition("/")[2] in _FIXED
        if not is_fixed or isinstance(history, jax.core.Tracer):
            continue
        # the state's scale is the scale_inv of the last step
        if not np.any(np.asarray(history) > 0) and np.all(np.asarray(scale_inv) == 1):
            raise ValueError(
                f"freeze: {quantizer.name}: no amax was recorded, so its scale would "
                "be 1 for ever; run jaxfp8.calibrate on a few batches first, or train"
            )
