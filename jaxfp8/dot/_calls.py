"""The base of objects that hold the recipe and the state of a product, and their calls,
which the products of Linen and NNX share.
"""

import functools
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.typing import ArrayLike, DTypeLike

from ..ops import ClampedSwiGLU
from ..recipes import QTensor
from . import _contexts, _frozen
from ._compute_dtype import compute_dtype
from ._dot_general import dot_general
from ._einsum import einsum_by
from ._fused_input import Activated, Normalized
from ._ragged_dot import ragged_dot


class StatefulProduct:
    """The base of objects that hold the recipe and the state of a product.

    Such an object has `_layer_name(kernel)`, the path of its layer;
    `_current_recipe()`; `_read_state(recipe)`; and `_frozen_arrays()`, those of
    `jaxfp8.freeze` or None.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # A layer that was given the class calls it as a product.
        if "precision" in kwargs:
            name = cls.__name__
            raise TypeError(
                f"{name}: a layer was given the class as its product; in Linen pass it "
                f"as dot_general_cls; in NNX give it an instance, {name}(recipe), of "
                f"jaxfp8.nnx.{name}, or change the finished model with "
                "jaxfp8.nnx.quantize"
            )
        return super().__new__(cls)

    def _multiply(self, *operands: Any, by=dot_general, **options: Any) -> jax.Array:
        """Compute `jaxfp8.dot_general`, or `by` in its place, of x, kernel and
        dimension numbers: with the recipe and the state of this object, or with the
        codes of `jaxfp8.freeze`.
        """
        with _contexts.layer(self._layer_name(operands[1])):
            observe = _contexts.observed_by.value
            if observe is not None:
                observe(self, *operands)
            recipe, frozen = self._current_recipe(), self._frozen_arrays()
            options["recipe"] = recipe
            if frozen is not None:
                return _frozen.multiply(frozen, *operands, by=by, **options)
            return by(*operands, state=self._read_state(recipe), **options)


def _with_operands(call):
    """Wrap the `__call__` of a product: a layer calls its `dot_general_cls` without
    operands, for a product.
    """

    @functools.wraps(call)
    def checked(self, *operands, **options):
        if not operands and not options:
            name = type(self).__name__
            raise TypeError(
                f"{name}: expected a call with operands, got a call without them: a "
                "layer was given an instance as a class, such as dot_general_cls or "
                "qk_attn_weights_einsum_cls; in Linen pass the class, "
                "dot_general_cls=jaxfp8.linen.Fp8DotGeneral, for einsums "
                "jaxfp8.linen.Fp8Einsum; in NNX pass the instance as dot_general= or "
                "qkv_dot_general=, or change the finished model with jaxfp8.quantize"
            )
        return call(self, *operands, **options)

    return checked


class DotGeneralCall:
    """A call like `jax.lax.dot_general`."""

    @_with_operands
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
        activation: str | ClampedSwiGLU | None = None,
    ) -> jax.Array:
        """Compute `jax.lax.dot_general` in FP8; see `jaxfp8.dot_general`."""
        return self._multiply(
            x,
            kernel,
            dimension_numbers,
            bias=bias,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
            activation=activation,
        )


class EinsumCall:
    """A call like `jnp.einsum`."""

    @_with_operands
    def __call__(
        self,
        eqn: str,
        lhs: ArrayLike,
        rhs: ArrayLike,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Compute `jnp.einsum(eqn, lhs, rhs)` in FP8, `lhs` the input and `rhs` the
        kernel; see `jaxfp8.einsum`.
        """
        return einsum_by(
            self._multiply,
            eqn,
            lhs,
            rhs,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )


class RaggedDotCall:
    """A call like `jax.lax.ragged_dot`."""

    @_with_operands
    def __call__(
        self,
        lhs: ArrayLike | Activated | Normalized | QTensor,
        rhs: ArrayLike | QTensor,
        group_sizes: ArrayLike,
        preferred_element_type: DTypeLike | None = None,
        by: Callable[..., jax.Array] = ragged_dot,
    ) -> jax.Array:
        """Compute `jax.lax.ragged_dot` in FP8, `[m, n]` of lhs `[m, k]`, rhs
        `[g, k, n]` and int32 group_sizes `[g]`; see `jaxfp8.ragged_dot`. `by` takes the
        place of that function, with its arguments, recipe and state.
        """

        def by_rows(x, kernel, dimension_numbers, **options):
            del x
            # frozen codes are `[g, n, k]`
            is_frozen = dimension_numbers != _OF_EACH_EXPERT
            kernel = kernel.transposed(1) if is_frozen else kernel
            return by(lhs, kernel, group_sizes, **options)

        if preferred_element_type is None:
            preferred_element_type = compute_dtype(lhs, rhs)
        # The experts are a batch of products of all rows: the layout of a kernel is the
        # same.
        rows = jax.ShapeDtypeStruct((rhs.shape[0], *lhs.shape), preferred_element_type)
        return self._multiply(
            rows,
            rhs,
            _OF_EACH_EXPERT,
            by=by_rows,
            preferred_element_type=preferred_element_type,
        )


_OF_EACH_EXPERT = (((2,), (1,)), ((0,), (0,)))
