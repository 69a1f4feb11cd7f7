"""Fp8DotGeneral: the `dot_general_cls` of Linen layers."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn

from .._dot_general import dot_general
from ..formats import E4M3, E5M2, HYBRID
from ..recipes import DelayedScaling, DotGeneralState, QuantizerState, init_state

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


class Fp8DotGeneral(nn.Module):
    """FP8 products for any Linen layer that takes a `dot_general_cls`; a plain swap for `nn.Fp8DotGeneral`.

        nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)
        nn.Dense(features, dot_general_cls=functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe))

    State is in the collection `_overwrite_with_gradient`, under Flax's names: for each of `input`, `kernel` and
    `output_grad` an `{name}_amax_history` f32 `(H,)`, slot 0 newest, and a `{name}_scale` f32 `(1,)`,
    `amax / FP8_MAX`. The gradient with respect to the collection is its next value; Flax's `TrainState` stores it.

    Attributes:
        recipe: how operands become FP8; without one `DelayedScaling(amax_history_len=amax_history_length)` in the
            format that the two dtypes name.
        amax_history_length, e4m3_dtype, e5m2_dtype: as Flax's class has them; for use without a recipe.

    Raises:
        ValueError: e4m3_dtype and e5m2_dtype are not a format of ours.
    """

    recipe: Any = None
    amax_history_length: int = 1024
    e4m3_dtype: Any = jnp.float8_e4m3fn
    e5m2_dtype: Any = jnp.float8_e5m2

    @nn.compact
    def __call__(self, x, kernel, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None):
        """As `jax.lax.dot_general`; see `jaxfp8.dot_general`."""
        recipe = self.recipe if self.recipe is not None else self._recipe_of_fields()
        initial = init_state(recipe)

        def stored(name):
            init: QuantizerState = getattr(initial, name)
            return QuantizerState(
                amax_history=self.variable(
                    OVERWRITE_WITH_GRADIENT, f"{name}_amax_history", lambda: init.amax_history
                ).value,
                scale=self.variable(OVERWRITE_WITH_GRADIENT, f"{name}_scale", lambda: init.scale).value,
            )

        return dot_general(
            x,
            kernel,
            dimension_numbers,
            recipe=recipe,
            state=DotGeneralState(stored("input"), stored("kernel"), stored("output_grad")),
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )

    def _recipe_of_fields(self) -> DelayedScaling:
        wanted = (jnp.dtype(self.e4m3_dtype), jnp.dtype(self.e5m2_dtype))
        for fp8_format in (HYBRID, E4M3, E5M2):
            if (fp8_format.dtype, fp8_format.backward_dtype) == wanted:
                return DelayedScaling(amax_history_len=self.amax_history_length, fp8_format=fp8_format)
        raise ValueError(
            "Fp8DotGeneral: e4m3_dtype, e5m2_dtype: expected float8_e4m3fn or float8_e5m2 forward and backward, got "
            f"{wanted[0].name} and {wanted[1].name}"
        )
