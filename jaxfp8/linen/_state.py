"""What Linen modules with FP8 state share: Flax's fields, the recipe they name and the variables of one product."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from .._state_tree import OVERWRITE_WITH_GRADIENT
from ..formats import E4M3, E5M2, HYBRID
from ..recipes import DelayedScaling, DotGeneralState, QuantizerState, init_state


class Fp8Module(nn.Module):
    """A module that holds the state of one FP8 product; `Fp8DotGeneral` documents state and fields."""

    recipe: Any = None
    amax_history_length: int = 1024
    e4m3_dtype: Any = jnp.float8_e4m3fn
    e5m2_dtype: Any = jnp.float8_e5m2

    def recipe_and_state(self) -> dict:
        """The keywords `recipe` and `state` of this module's product.

        Variables without state, as for inference, are fine: scales then come from the tensors at hand.
        """
        recipe = self.recipe if self.recipe is not None else self._recipe_of_fields()
        if not self.is_mutable_collection(OVERWRITE_WITH_GRADIENT) and not self.has_variable(
            OVERWRITE_WITH_GRADIENT, "input_scale"
        ):
            return {"recipe": recipe, "state": DotGeneralState(None, None, None)}
        initial = init_state(recipe)

        def stored(name):
            init: QuantizerState = getattr(initial, name)
            return QuantizerState(
                amax_history=self.variable(
                    OVERWRITE_WITH_GRADIENT, f"{name}_amax_history", lambda: init.amax_history
                ).value,
                scale=self.variable(OVERWRITE_WITH_GRADIENT, f"{name}_scale", lambda: init.scale).value,
            )

        return {"recipe": recipe, "state": DotGeneralState(stored("input"), stored("kernel"), stored("output_grad"))}

    def _recipe_of_fields(self) -> DelayedScaling:
        wanted = (jnp.dtype(self.e4m3_dtype), jnp.dtype(self.e5m2_dtype))
        for fp8_format in (HYBRID, E4M3, E5M2):
            if (fp8_format.dtype, fp8_format.backward_dtype) == wanted:
                return DelayedScaling(amax_history_len=self.amax_history_length, fp8_format=fp8_format)
        raise ValueError(
            f"{type(self).__name__}: e4m3_dtype, e5m2_dtype: expected float8_e4m3fn or float8_e5m2 forward and "
            f"backward, got {wanted[0].name} and {wanted[1].name}"
        )
