"""The arms of the comparison: each is a dtype, and for FP8 a recipe."""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfp8 import recipes
from jaxfp8.ops import _support


class Arm(NamedTuple):
    """One way to train the model.

    Attributes:
        dtype: the compute dtype of all layers; FP8 products take their operands in this
            dtype.
        color: the color in the picture.
        recipe: the recipe of the FP8 products; None for an arm without FP8.
        precision: the precision of float32 products on GPUs, a value of
            `jax.default_matmul_precision`.
        loss_scaled: whether the loss is scaled dynamically, and steps with gradients
            that are not finite are skipped.
    """

    dtype: Any
    color: str
    recipe: recipes.Recipe | None = None
    precision: str | None = None
    loss_scaled: bool = False

    @contextlib.contextmanager
    def region(self):
        """Select the recipe for the code inside: initialization, differentiation and
        evaluation of the model.
        """
        precision = jax.default_matmul_precision(self.precision)
        with recipes.autocast(self.recipe, enabled=self.recipe is not None), precision:
            yield


def current_and_mx(role):
    """Return a quantizer with one scale forward, and with MX blocks for the gradient,
    as only custom recipes can.
    """
    if role in ("linear_input", "linear_weight"):
        return recipes.Float8CurrentScalingQuantizer(jnp.float8_e4m3fn)
    return recipes.MXFP8Quantizer() if role == "linear_grad_output" else None


ARMS = {
    "f32": Arm(jnp.float32, "#999999", precision="float32"),
    "tf32": Arm(jnp.float32, "#bcae8a", precision="tensorfloat32"),
    "bf16": Arm(jnp.bfloat16, "#444444"),
    "f16": Arm(jnp.float16, "#8c564b", loss_scaled=True),
    "delayed": Arm(jnp.bfloat16, "#0b6fd6", recipes.DelayedScaling()),
    "current": Arm(jnp.bfloat16, "#e07b00", recipes.Float8CurrentScaling()),
    "rowwise": Arm(jnp.bfloat16, "#2a9d4a", recipes.Float8RowwiseScaling()),
    "block": Arm(jnp.bfloat16, "#c4262e", recipes.Float8BlockScaling()),
    "mxfp8": Arm(jnp.bfloat16, "#7b4fc9", recipes.MXFP8BlockScaling()),
    "custom": Arm(jnp.bfloat16, "#d14fa3", recipes.CustomRecipe(current_and_mx)),
}
FP8_ARMS = tuple(name for name, arm in ARMS.items() if arm.recipe is not None)


def has_tf32() -> bool:
    """Return whether the default device multiplies in TensorFloat-32."""
    return _support.capability(jax.devices()[0]) >= (8, 0)
