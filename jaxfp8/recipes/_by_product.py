"""ByProduct: a recipe for each of the three products of a layer.

Each operand is read by two products: x by fprop and wgrad, the kernel by fprop and
dgrad, grad by dgrad and wgrad. So there are two quantizers of each. They are equal in
all other recipes, and then both products read the same codes.
"""

import dataclasses

from ._quantizer import Quantizer
from ._recipe import PRODUCTS, HighPrecision, HighPrecisionQuantizer, Recipe, checked

_SHARED = tuple(field.name for field in dataclasses.fields(Recipe))
# Positions in `ByProduct.quantizers`: the quantizers of second products are as many
# places after those of first ones.
_SECOND = 5


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
        precise, min_size, pipeline_axes, fp8_residuals: keyword-only, see `Recipe`;
            they belong to all three products, so the recipes of the products leave them
            as they are.

    Raises:
        TypeError: the recipe of a product is neither a Recipe nor None, or is a
            ByProduct itself.
        ValueError: no product has FP8; the recipe of a product sets an option that
            belongs to all three; or an option has a value it cannot have.
    """

    fprop: Recipe | None = None
    dgrad: Recipe | None = None
    wgrad: Recipe | None = None

    operands = (
        *Recipe.operands,
        "output",
        "input_grad",
        "wgrad_input",
        "dgrad_kernel",
        "wgrad_output_grad",
    )

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            recipe = getattr(self, product)
            if recipe is not None:
                checked(f"ByProduct: {product} (None is high precision)", recipe)
                self.expect(
                    not isinstance(recipe, ByProduct),
                    product,
                    "the recipe of one product",
                    TypeError,
                )
                for name in _SHARED:
                    if getattr(recipe, name) != getattr(Recipe(), name):
                        raise ValueError(
                            f"ByProduct: {product}: expected a recipe that leaves "
                            f"{name} as it is, got {getattr(recipe, name)!r}; give "
                            f"{name}= to ByProduct, for all three products"
                        )
        if all(
            isinstance(getattr(self, product) or HighPrecision(), HighPrecision)
            for product in PRODUCTS
        ):
            raise ValueError(
                "ByProduct: expected a recipe with FP8 for fprop, dgrad or wgrad, got "
                "None or HighPrecision() for all three; a layer without FP8 has the "
                "recipe HighPrecision()"
            )
        super().__post_init__()

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of x, kernel, grad, y and the gradient of x, then those
        of second products.

        Second products are wgrad for x, dgrad for the kernel, wgrad for grad.
        """
        fprop, dgrad, wgrad = (
            all_quantizers(getattr(self, name) or HighPrecision()) for name in PRODUCTS
        )
        return (
            fprop[0],
            fprop[1],
            dgrad[2],
            fprop[3],
            dgrad[4],
            wgrad[0],
            dgrad[1],
            wgrad[2],
        )


def all_quantizers(recipe: Recipe) -> tuple[Quantizer, ...]:
    """Return the quantizers of a recipe, one for each field of DotGeneralState, in the
    order of its fields.
    """
    quantizers = recipe.quantizers()
    quantizers += (HighPrecisionQuantizer(),) * (_SECOND - len(quantizers))
    return quantizers if len(quantizers) > _SECOND else (*quantizers, *quantizers[:3])


def second(values: tuple, operand: int):
    """Return the one of `values`, one for each quantizer, that belongs to the second
    product of an operand.

    Args:
        values: quantizers, states or uses, in the order of the fields of
            DotGeneralState.
        operand: 0 for x, 1 for the kernel, 2 for the gradient of the output.
    """
    return values[_SECOND + operand]


def shares_codes(quantizers: tuple[Quantizer, ...], operand: int) -> bool:
    """Tell whether both products of an operand, numbered as for `second`, read the same
    codes.
    """
    return quantizers[operand] == second(quantizers, operand)


def with_state(quantizers: tuple[Quantizer, ...]) -> list[Quantizer]:
    """Return the quantizers whose states a product keeps: where two products read the
    same codes, there is one.
    """
    unused = (
        HighPrecisionQuantizer()
        if shares_codes(quantizers, i)
        else second(quantizers, i)
        for i in range(3)
    )
    return [*quantizers[:_SECOND], *unused]
