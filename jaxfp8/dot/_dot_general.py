"""dot_general in FP8: `jax.lax.dot_general` with a recipe and a state."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .. import recipes
from .._jax import _mesh
from ..ops import ClampedSwiGLU, _checks
from ..recipes import DotGeneralState, GEMMType, QTensor, Recipe
from . import _contexts
from ._compute_dtype import compute_dtype, dtypes_of, not_wider
from ._fused_input import Activated, FusedInput, Normalized, Pair, activated
from ._gemms import Product
from ._high_precision import multiply_by_jax
from ._layout import Layout, checked_numbers, layouts, size
from ._product import OUTPUT_NAME, multiply


def dot_general(
    x: ArrayLike | Activated | Normalized,
    kernel: ArrayLike | QTensor,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    bias: ArrayLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    activation: str | ClampedSwiGLU | None = None,
) -> jax.Array:
    """Compute `jax.lax.dot_general` with both operands, and the gradient of the output,
    in FP8.

    It equals `lax.dot_general(q(x), q(kernel), dimension_numbers)`, where `q` quantizes
    and dequantizes with the scale that the recipe takes from the state; products are
    exact and accumulate in f32. Gradients pass straight through `q` (saturated elements
    still get theirs) and are products of FP8 operands as well. **The cotangent of
    `state` is the next state**: overwrite with it, never add it.

    Args:
        x: the `input`, bfloat16, float16 or float32 of any shape; or the result of
            `jaxfp8.activated` or `jaxfp8.normalized`; or a QTensor, as for kernel.
        kernel: bfloat16, float16 or float32 of any shape; a float32 kernel gets its
            gradient in float32. Or a QTensor, as `jaxfp8.quantize_params` gives it: the
            product does not quantize it, and its `source` gets the gradient.
        dimension_numbers: `((x_contract, kernel_contract), (x_batch, kernel_batch))`,
            as for `jax.lax.dot_general`.
        recipe: for example `DelayedScaling()`. None computes in high precision and does
            not touch the state.
        state: `init_state(recipe)`, or the state that the last step returned; None
            where the recipe keeps no state. With `DotGeneralState(None, None, None)`
            delayed scaling keeps no state, and takes every scale from the amax of the
            tensor at hand, which reads the tensor once more. Under `vmap` over kernels
            each product then has its own scales; under `vmap` over x alone, one scale
            of x serves the whole batch.
        bias: bfloat16, float16 or float32, shaped like the free dimensions of kernel.
            The bias is rounded to the result's dtype and added in float32, before the
            only rounding of the result. Its gradient is summed in float32, in the pass
            that quantizes the gradient of the output.
        precision: None or DEFAULT leaves accumulation to the recipe, whatever
            `jax.default_matmul_precision` says; HIGH or HIGHEST makes all three
            products precise.
        preferred_element_type: dtype of the result: bfloat16, float16 or float32. The
            default is `jnp.result_type(x, kernel)`, where a QTensor counts as its
            source; bfloat16 if both lack a source.
        out_sharding: PartitionSpec or NamedSharding of the result, on a mesh with
            explicit axes, as for `jax.lax.dot_general`.
        activation: one of `jaxfp8.activated`. The result is then
            `jaxfp8.activated(y, activation)` of the product y, as the x of the next
            product: the pass that computes the gradient of y, from the gradient of the
            activated values, also quantizes it.

    Returns:
        The product: the batch dimensions, then the free dimensions of x, then those of
        kernel. With `activation` the product is an `Activated`, which type checkers
        take for an array too.

    Raises:
        TypeError: an operand's or the result's dtype is not bfloat16, float16 or
            float32; `state` is not a DotGeneralState, `recipe` not a Recipe, or
            `out_sharding` no sharding; the gradient of a QTensor without a source;
            second derivatives and forward mode.
        ValueError: `dimension_numbers` are malformed or do not fit the shapes; the
            recipe's state is missing, or has another shape or history length;
            `precision` is not listed above; `activation` is unknown, or gated and the
            product is not `[..., 2, n]`.
    """
    # Shapes are checked first, because a missing state is often the state of another
    # layer.
    x, kernel = operand("dot_general: x", x), operand("dot_general: kernel", kernel)
    shapes = x.array.shape, kernel.array.shape
    numbers = checked_numbers(dimension_numbers, *shapes)
    both = layouts(*shapes, numbers)
    is_pair = isinstance(kernel.value, Pair) and kernel.array.ndim == 3
    y, *values = multiply_operands(
        "dot_general",
        Product,
        recipe,
        state,
        (x, kernel),
        (both[0].is_rows_by_last, is_pair and both[1].contract_first),
        layouts=both,
        preferred_element_type=preferred_element_type,
        bias=_checked_bias(bias, both[1]),
        precision=precision,
        out_sharding=out_sharding,
        dimension_numbers=numbers,
        activation=activation,
        is_pair=is_pair,
    )
    if values:
        return Activated(y, activation, *values)
    return y if activation is None else activated(y, activation)


def multiply_operands(
    op,
    kind,
    recipe,
    state,
    operands,
    can_fuse,
    *,
    layouts=None,
    preferred_element_type=None,
    bias=None,
    group_sizes=None,
    precision=None,
    out_sharding=None,
    **fields,
) -> list[jax.Array]:
    """Multiply two operands: in FP8, or in high precision by JAX.

    Args:
        op: the public function, for messages.
        kind: the class of the product.
        recipe, state, preferred_element_type, precision, out_sharding: arguments of
            that function, see `dot_general`.
        operands: x and kernel.
        can_fuse: for each operand, whether a fused input is quantized by the product.
        layouts: those of both operands, where `Recipe.min_size` counts.
        bias, group_sizes: see `forward`.
        fields: what else the product has.

    Returns:
        The results of `multiply`; in high precision y alone.
    """
    x, kernel = operands
    if recipe is None:
        recipe = recipes.HighPrecision()
    quantizers, state = checked_quantizers(op, recipe, state)
    why = why_not_fp8(recipe, layouts)
    if 0 in (*x.array.shape, *kernel.array.shape):
        # Gradients are zero, and the state is not touched.
        why = "an operand has no element"
    if why is None:  # in high precision JAX checks what it gets
        out_sharding = spec_of(op, out_sharding)
        fields["precise"] = _precise(precision, recipe)
        fields["reduce"] = recipes.AmaxReduction.for_recipe(recipe)
    if preferred_element_type is None:
        preferred_element_type = compute_dtype(x.value, kernel.value)
    out_dtype = _checks.dtype(
        op, "preferred_element_type", preferred_element_type, _checks.HIGH_PRECISION
    )
    # The product as hashable data, by which JAX caches its programs.
    product = kind(
        quantizers=quantizers,
        x_dtype=x.array.dtype,
        wgrad_dtype=recipe.wgrad_dtype or kernel.array.dtype,
        out_dtype=out_dtype,
        out_sharding=out_sharding,
        fp8_residual=recipe.fp8_residuals,
        **fields,
    )
    if why is not None:
        dtype = not_wider(product.out_dtype, *dtypes_of(x.value, kernel.value))
        with _contexts.high_precision(why):
            return [
                multiply_by_jax(product, x, kernel, bias, group_sizes, precision, dtype)
            ]
    both = []
    for i, operand in enumerate(operands):
        both.append(operand.for_product(i, recipe, quantizers, can_fuse[i]))
    arrays, codes = zip(*both, strict=True)
    scales = recipes.read(quantizers, state)
    y, *values = multiply(product, *arrays, bias, scales, codes, group_sizes)
    return [y, *values] if values else [checkpoint_name(y, OUTPUT_NAME)]


class Operand(NamedTuple):
    """An operand of a product.

    Attributes:
        array: the array; of a QTensor its source, without a source its data; of a
            fused input its values.
        value: the QTensor or the fused input; else the array.
    """

    array: jax.Array
    value: jax.Array | QTensor | FusedInput

    def for_product(self, i, recipe, quantizers, can_fuse) -> tuple:
        """Return the array and the codes of operand i of a product in FP8.

        Codes have no source, which is the array: gradients reach it there. A fused
        input is quantized by the product where its quantizer has one scale, for both
        its products, and where `can_fuse`.
        """
        array, value = self
        if isinstance(value, QTensor):
            return array, dataclasses.replace(value, source=None)
        if not isinstance(value, FusedInput):
            return array, None
        if recipe.fp8_residuals:
            array = value.values(fp8_residual=True)
        quantizer, second = quantizers.of_operand(i)
        has_one_scale = quantizer.has_one_scale and second == recipes.SharedCodes()
        return array, value.fixed() if has_one_scale and can_fuse else None


def operand(name: str, value) -> Operand:
    """Return an argument as an operand.

    Args:
        name: the op and the argument, for messages.
        value: the argument.
    """
    if isinstance(value, QTensor):
        array = value.data if value.source is None else value.source
        return Operand(_mesh.without_reduced(array), value)
    is_fused = isinstance(value, FusedInput)
    array = value.value if is_fused else value
    array = _mesh.without_reduced(_checks.high_precision(*name.split(": "), array))
    return Operand(array, value if is_fused else array)


def _checked_bias(bias, kernel: Layout) -> jax.Array | None:
    if bias is None:
        return None
    bias = _mesh.without_reduced(_checks.high_precision("dot_general", "bias", bias))
    free = tuple(kernel.shape[d] for d in kernel.free)
    return _checks.shape("dot_general", "bias", bias, free)


def why_not_fp8(recipe, layouts) -> str | None:
    """Return the reason why a product is in high precision, a clause; None for FP8."""
    if isinstance(recipe, recipes.HighPrecision):
        return "autocast is off" if recipes.is_off() else "the recipe is None"
    if layouts and recipe.min_size and size(*layouts) < recipe.min_size**3:
        return f"smaller than min_size={recipe.min_size} of the recipe"
    return None


def checked_quantizers(
    op: str, recipe, state
) -> tuple[recipes.ByQuantizer, DotGeneralState]:
    """Return the quantizers of a recipe, and `state`, an argument of `op`; high
    precision does not read its state.

    Raises:
        TypeError, ValueError: `state` is not a state of this recipe.
    """
    quantizers = recipes.checked(f"{op}: recipe", recipe).quantizers()
    if isinstance(recipe, recipes.HighPrecision):
        state = None
    if state is None:
        if recipes.keeps_state(recipe):
            raise ValueError(
                f"{op}: state: {type(recipe).__name__} keeps state; pass "
                "jaxfp8.init_state(recipe), and after a step the gradient with "
                "respect to that state; or DotGeneralState(None, None, None) to keep "
                "no state"
            )
        state = DotGeneralState(None, None, None)
    if not isinstance(state, DotGeneralState):
        raise TypeError(
            f"{op}: state: expected a DotGeneralState, got {type(state).__name__}"
        )
    for name, quantizer in quantizers._asdict().items():
        old = getattr(state, name)
        if old is not None:
            quantizer.check_state(f"{op}: state.{name}", old)
    for leaf in jax.tree.leaves(state):
        if jax.typeof(leaf).sharding.spec.reduced:
            raise ValueError(
                f"{op}: state: expected one without `reduced` axes, because uses of a "
                "state are not summed"
            )
    return quantizers, state


def spec_of(op: str, out_sharding) -> PartitionSpec | None:
    """Return the PartitionSpec of an argument `out_sharding` of `op`."""
    spec = getattr(out_sharding, "spec", out_sharding)
    if not isinstance(spec, PartitionSpec | None):
        raise TypeError(
            f"{op}: out_sharding: expected a PartitionSpec or NamedSharding, got "
            f"{out_sharding!r}"
        )
    if spec is not None and spec.unreduced:
        raise ValueError(
            f"{op}: out_sharding: expected one without `unreduced`, got {spec}; FP8 "
            "products are summed over devices"
        )
    return spec


def _precise(precision, recipe) -> frozenset:
    """Return the names of the products that accumulate precisely."""
    both = precision if isinstance(precision, (tuple, list)) else (precision,)
    try:
        # unpacking fails where one operand alone has the default
        (is_default,) = {lax.Precision(p) == lax.Precision.DEFAULT for p in both}
    except ValueError as error:
        raise ValueError(
            "dot_general: precision: expected None, DEFAULT, HIGH or HIGHEST for both "
            f"operands, got {precision!r}"
        ) from error
    return frozenset(recipe.precise if is_default else GEMMType)
