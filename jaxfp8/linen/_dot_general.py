"""Fp8DotGeneral, the `dot_general_cls` of Linen layers, and Fp8Einsum: products that hold their own state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax.typing import ArrayLike, DTypeLike

from ..dot import Activated, Normalized, einsum_by
from ..recipes import QTensor, Recipe, checked
from ._state import Fp8Module


class Fp8DotGeneral(Fp8Module):
    """FP8 products for any Linen layer that takes a `dot_general_cls`; a plain swap for `nn.Fp8DotGeneral`.

        nn.Dense(features, dot_general_cls=jaxfp8.Fp8DotGeneral)
        nn.Dense(features, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))

    State is in the collection `_overwrite_with_gradient`, under Flax's names: for each of `input`, `kernel` and
    `output_grad` an `{name}_amax_history` f32 `(H,)`, slot 0 newest, and a `{name}_scale` f32 `(1,)`,
    `amax / FP8_MAX`. The gradient with respect to the collection is its next value; Flax's `TrainState` stores it.
    Applied to variables without the collection, the module takes its scales from the tensors at hand.

    Attributes:
        recipe: how operands become FP8; None is the recipe of `jaxfp8.autocast`, outside of it
            `DelayedScaling(amax_history_len=amax_history_length)` in the format that the two dtypes name.
        amax_history_length, e4m3_dtype, e5m2_dtype: the fields of Flax's class, for use without a recipe. A layer that
            sets one of these fields has a recipe of its own, which `jaxfp8.autocast` does not replace.

    Raises:
        TypeError: a layer was given an instance as its `dot_general_cls`.
        ValueError: no `jaxfp8.Format` has the forward `e4m3_dtype` and the backward `e5m2_dtype`; or `init` makes state
            inside an `nn.scan` or `nn.vmap` that does not carry the collection of state.
    """

    def __post_init__(self) -> None:
        # Flax makes a module in a field a submodule named like the field. A layer calls its dot_general_cls without
        # arguments, for a product; an instance would take that call for a product without operands.
        if (self.name or "").endswith("dot_general_cls"):
            raise TypeError(
                f"{type(self.parent).__name__}: {self.name}: expected a class or a function that makes a product, got "
                f"an instance; pass {self.name}=jaxfp8.Fp8DotGeneral, or with a recipe "
                f"{self.name}=jaxfp8.make_dot_general_cls(recipe)"
            )
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: ArrayLike | Activated | Normalized,
        kernel: ArrayLike | QTensor,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
        *,
        bias: ArrayLike | None = None,
        activation: str | None = None,
    ) -> jax.Array:
        """Compute `jax.lax.dot_general` in FP8; see `jaxfp8.dot_general`."""
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        options |= {"bias": bias, "activation": activation}
        with self.naming():
            return self.product()(x, kernel, dimension_numbers, precision=precision, **options)


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
        out_sharding: Any = None,
    ) -> jax.Array:
        """Compute `jnp.einsum(eqn, lhs, rhs)` in FP8, `lhs` the input and `rhs` the kernel; see `jaxfp8.einsum`."""
        options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
        with self.naming():
            return einsum_by(self.product(), eqn, lhs, rhs, precision=precision, **options)


def make_dot_general_cls(recipe: Recipe) -> Callable[..., Fp8DotGeneral]:
    """Return `Fp8DotGeneral` with a recipe, as a `dot_general_cls`; equal recipes give the same object.

        nn.Dense(features, dot_general_cls=jaxfp8.make_dot_general_cls(jaxfp8.MXFP8BlockScaling()))

    An NNX layer takes an object instead: `dot_general=jaxfp8.nnx.Fp8DotGeneral(recipe)`.

    Raises:
        TypeError: `recipe` is not a Recipe.
    """
    return _cached_cls(checked("make_dot_general_cls: recipe", recipe))


@functools.cache
def _cached_cls(recipe):
    # One object for equal recipes: `partial` compares by identity, and layers are compared when programs are cached.
    return functools.partial(Fp8DotGeneral, recipe=recipe)
