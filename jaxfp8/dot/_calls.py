"""The calls of objects that hold the recipe and the state of a product, which the
products of Linen and NNX share.

Such an object has `_naming(kernel)`, a context that names its layer, and
`_product(x, kernel, dimension_numbers, by=dot_general)`, which gives `dot_general`, or
`by` in its place, with recipe and state for these operands, or with frozen codes.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from ..ops import ClampedSwiGLU
from ..recipes import QTensor
from ._fused_input import Activated, Normalized
from ._ragged_dot import ragged_dot, ragged_dot_by


class DotGeneralCall:
    """A call like `jax.lax.dot_general`."""

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
        with self._naming(kernel):
            operands = x, kernel, dimension_numbers
            return self._product(*operands)(
                *operands,
                bias=bias,
                precision=precision,
                preferred_element_type=preferred_element_type,
                out_sharding=out_sharding,
                activation=activation,
            )


class RaggedDotCall:
    """A call like `jax.lax.ragged_dot`."""

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
        with self._naming(rhs):
            return ragged_dot_by(
                self._product,
                lhs,
                rhs,
                group_sizes,
                preferred_element_type=preferred_element_type,
                by=by,
            )
