"""Custom recipes: a user's quantizer, or a stock one, for each tensor of a product."""

import dataclasses
import functools
from collections.abc import Callable

from ._quantizer import Quantizer
from ._recipe import ByQuantizer, HighPrecisionQuantizer, Recipe

# In the order of `ByQuantizer`.
ROLES = (
    "linear_input",
    "linear_weight",
    "linear_grad_output",
    "linear_output",
    "linear_grad_input",
)


@dataclasses.dataclass(frozen=True)
class CustomRecipe(Recipe):
    """A quantizer for each tensor of a product, chosen by the role of the tensor.

        def qfactory(role):
            if role in ("linear_input", "linear_weight"):
                return jaxfp8.recipes.Float8CurrentScalingQuantizer(
                    fp8_dtype=jnp.float8_e4m3fn
                )
            if role == "linear_grad_output":
                return jaxfp8.recipes.MXFP8Quantizer(fp8_dtype=jnp.float8_e5m2)

        recipe = jaxfp8.CustomRecipe(qfactory)

    An FP8 kernel multiplies two operands where one exists for their dtypes and scales;
    a quantizer may bring its own product (`Quantizer.qgemm`); otherwise operands are
    dequantized to float32 and multiplied.

    The state of a quantizer is in the variables `<role>_<name of the leaf>` of the
    collection `_overwrite_with_gradient`; delayed scaling of x has
    `linear_input_amax_history` and `linear_input_scale`.

    Source: TransformerEngine's custom recipes, which exist in PyTorch only.

    Attributes:
        qfactory: a pure function `role -> Quantizer or None`, called once for each
            role. Roles: `linear_input` (x), `linear_weight` (kernel),
            `linear_grad_output` (the gradient of y); and `linear_output` (y) and
            `linear_grad_input` (the gradient of x), which are dequantized at once,
            because no product reads their codes. A tensor whose role gets None stays in
            high precision.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError: an option has a value it cannot have.
        TypeError: an option has a type it cannot have; qfactory is not a function that
            hashes.

    `quantizers()` raises a TypeError where qfactory returns something else than a
    Quantizer that hashes, or None.
    """

    qfactory: Callable[[str], Quantizer | None]

    operands = ROLES

    def __post_init__(self) -> None:
        # A class is callable too: a quantizer's class would take the role as its first
        # field.
        is_class = isinstance(self.qfactory, (type, Recipe))
        is_function = callable(self.qfactory) and not is_class
        self.expect(is_function, "qfactory", "a function of a role", TypeError)
        super().__post_init__()

    def quantizer(self, tensor: str, product: str) -> Quantizer:
        """Return the quantizer that the factory gives the role of the tensor.

        Raises:
            TypeError: the factory returns neither a Quantizer that hashes nor None; or
                the first state of its quantizer is not of float32 arrays.
            ValueError: a number in that state is negative or not finite.
        """
        return _quantizer(self.qfactory, ROLES[ByQuantizer._fields.index(tensor)])


@functools.lru_cache(maxsize=1024)
def _quantizer(qfactory, role) -> Quantizer:
    """Call the factory once for a role, so that both products that read an operand have
    one quantizer.
    """
    quantizer = qfactory(role)
    if quantizer is None:
        return HighPrecisionQuantizer()
    if not isinstance(quantizer, Quantizer):
        hint = "; it is the class, call it" if isinstance(quantizer, type) else ""
        needed = f"a jaxfp8.Quantizer or None for {role!r}"
        raise TypeError(
            f"CustomRecipe: qfactory: expected {needed}, got {quantizer!r}{hint}"
        )
    try:
        hash(quantizer)
    except TypeError:
        raise TypeError(
            f"CustomRecipe: qfactory: expected for {role!r} a quantizer with a "
            "hash, as programs with equal quantizers are the same program; got "
            f"{quantizer!r}: make it a dataclass with frozen=True"
        ) from None
    # Check the first state once, here; every layer will make one.
    quantizer.check_init()
    return quantizer
