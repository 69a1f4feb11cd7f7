"""Fp8Einsum: an FP8 einsum that holds its own state."""

import jax
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ..dot import einsum_by
from ._state import Fp8Module


class Fp8Einsum(Fp8Module):
    """An FP8 einsum of an input and a kernel; a plain swap for `nn.Fp8Einsum`.

        y = jaxfp8.linen.Fp8Einsum(recipe=recipe)("gecm,emh->gech", x, kernel)

    The first operand is always the input and the second always the kernel. Unlike Flax's class it does not round the
    input to the kernel's dtype: the result has `jnp.result_type(x, kernel)`, or `preferred_element_type`.

    State and fields are those of `Fp8DotGeneral`.
    """

    @nn.compact
    def __call__(
        self,
        eqn: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: NamedSharding | PartitionSpec | None = None,
    ) -> jax.Array:
        """Compute `jnp.einsum(eqn, lhs, rhs)` in FP8, `lhs` the input and `rhs` the kernel; see `jaxfp8.einsum`."""
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        with self.naming():
            return einsum_by(self.product(), eqn, lhs, rhs, precision=precision, **options)
