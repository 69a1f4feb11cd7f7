"""ByProduct: a recipe for each of the three products of a layer.

Each operand is read by two products: x by fprop and wgrad, the kernel by fprop and
dgrad, grad by dgrad and wgrad. Their quantizers are equal in all other recipes, and
then both products read the same codes.
"""

import dataclasses

from ._quantizer import Quantizer
from ._recipe import PRODUCTS, HighPrecision, Recipe, checked

_SHARED = tuple(field.name for field in dataclasses.fields(Recipe))


@dataclasses.dataclass(frozen=True)
class ByProduct(Recipe):
    """A recipe for fprop, one for dgrad and one for wgrad; None leaves that product in
    the layer's dtype.

        # the kernel's gradient in bfloat16
        ByProduct(fprop=MXFP8BlockScaling(), dgrad=MXFP8BlockScaling(), wgrad=None)

        y       = q_fprop(x)    @ q_fprop(kernel)
        dx      = q_dgrad(grad) @ q_dgrad(kernel).T
        dkernel = q_wgrad(x).T  @ q_wgrad(grad)

    Each operand is read by two products. Where their recipes have equal quantizers for
    the operand, it is quantized once and both read its codes; else it is quantized for
    each, which is a launch, a read and the other codes more. A product that stays in
    high precision keeps its operands for the backward as they are: with `wgrad=None` x
    in its own dtype, two bytes an element in bfloat16 in place of one.

    A quantizer keeps state where its recipe does. That of a second product's own codes
    is called `wgrad_input`, `dgrad_kernel` or `wgrad_output_grad`, the others as in
    every recipe.

    Attributes:
        fprop, dgrad, wgrad: the recipe of each product, or None. Of a `CustomRecipe`
            for fprop the output's quantizer counts too, of one for dgrad that of the
            gradient of x.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`; they belong to all three products, so the recipes of the products
            leave them as they are.

    Raises:
        TypeError: the recipe of a product is neither a Recipe nor None, or is a
            ByProduct itself.
        ValueError: no product has FP8; the recipe of a product sets an option that
            belongs to all three; or an option has a value it cannot have.
    """

    fprop: Recipe | None = None
    dgrad: Recipe | None = None
    wgrad: Recipe | None = None

    def __post_init__(self) -> None:
        has_fp8 = False
        for product in PRODUCTS:
            recipe = getattr(self, product)
            if recipe is None:
                continue
            has_fp8 |= not isinstance(recipe, HighPrecision)
            checked(f"ByProduct: {product} (None is high precision)", recipe)
            is_of_one = not isinstance(recipe, ByProduct)
            self.expect(is_of_one, product, "the recipe of one product", TypeError)
            for name in _SHARED:
                if getattr(recipe, name) != getattr(Recipe(), name):
                    raise ValueError(
                        f"ByProduct: {product}: expected a recipe that leaves "
                        f"{name} as it is, got {getattr(recipe, name)!r}; give "
                        f"{name}= to ByProduct, for all three products"
                    )
        if not has_fp8:
            raise ValueError(
                "ByProduct: expected a recipe with FP8 for fprop, dgrad or wgrad, got "
                "None or HighPrecision() for all three; a layer without FP8 has the "
                "recipe HighPrecision()"
            )
        super().__post_init__()

    def quantizer(self, tensor: str, product: str) -> Quantizer:
        """Return the quantizer that the recipe of the product gives the tensor."""
        return (getattr(self, product) or HighPrecision()).quantizer(tensor, product)
