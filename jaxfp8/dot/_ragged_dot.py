"""ragged_dot in FP8: `jax.lax.ragged_dot` with a recipe and a state, for mixtures of
experts.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .. import ops
from .._jax import _mesh
from ..ops import _checks
from ..recipes import (
    DotGeneralState,
    GEMMType,
    QTensor,
    Recipe,
)
from ._compute_dtype import promoted
from ._dot_general import (
    multiply_operands,
    operand,
)
from ._fused_input import Activated, FusedInput, Normalized
from ._gemms import Product
from ._high_precision import is_blockwise, multiply_values


def ragged_dot(
    lhs: ArrayLike | Activated | Normalized | QTensor,
    rhs: ArrayLike | QTensor,
    group_sizes: ArrayLike,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Compute `jax.lax.ragged_dot` with both operands, and the gradient of the output,
    in FP8.

    The rows of `lhs` are cut into consecutive groups, and each is multiplied with a
    matrix of its own:

        # for group e, of group_sizes[e] rows
        y[begin:end] = q(lhs)[begin:end] @ q(rhs)[e]

    Rows beyond the last group give zeros and get no gradient. Their values do not
    matter: lhs and the gradient of the output have these rows set to zero before an
    amax is computed. Scales, straight-through gradients and state are those of
    `jaxfp8.dot_general`: one scale for lhs, one for all of rhs, one for the gradient of
    the output, or a scale for each block of them. **The cotangent of `state` is the
    next state**: overwrite with it, never add it.

    Blocks of lhs and of the gradient are counted from the first row, whatever the
    groups. The gradient of rhs contracts rows. There a block of 128 rows may have rows
    of several groups, which share its scale; each group reads its own rows. Where group
    sizes are multiples of 128, a block has rows of one group.

    Args:
        lhs: the `input`, bfloat16, float16 or float32 `[m, k]`; or the result of
            `jaxfp8.activated` or `jaxfp8.normalized`; or a QTensor, as for rhs.
        rhs: the `kernel`, bfloat16, float16 or float32 `[g, k, n]`; a float32 kernel
            gets its gradient in float32. Or a QTensor, as `jaxfp8.quantize_params`
            gives it: the product does not quantize it, and its `source` gets the
            gradient.
        group_sizes: int32 `[g]`, of sum at most m; a negative size counts as 0. The
            sizes are read on the device, and the host does not wait.
        recipe: for example `DelayedScaling()` or `Float8BlockScaling()`. None computes
            `jax.lax.ragged_dot` and does not touch the state; `vmap` then reaches what
            it reaches there. A product that a `ByProduct` has None for is that of
            `jax.lax.ragged_dot`.
        state: `init_state(recipe)`, or the state that the last step returned; None
            where the recipe keeps no state. With `DotGeneralState(None, None, None)`
            delayed scaling keeps no state. Under `vmap` each example has its own
            scales; the next states of examples that share a state combine by max, and
            an lhs or rhs that the examples share is copied for each of them.
        preferred_element_type: dtype of the result: bfloat16, float16 or float32. The
            default is `jnp.result_type(lhs, rhs)`, where a QTensor counts as its
            source; bfloat16 if both lack a source.

    Returns:
        The product `[m, n]`, of `preferred_element_type`.

    Raises:
        TypeError: an operand, `group_sizes` or the result has a dtype that is not
            listed above; `state` is not a DotGeneralState or `recipe` not a Recipe; the
            gradient of a QTensor without a source; second derivatives and forward mode.
        ValueError: shapes do not fit; the state is missing, or has another shape or
            history length; or the recipe or a QTensor has codes that are not FP8, or
            other scales than one for the tensor or one for each block.
    """
    return ragged_product(
        lhs,
        rhs,
        group_sizes,
        recipe=recipe,
        state=state,
        preferred_element_type=preferred_element_type,
    )


def ragged_product(
    lhs,
    rhs,
    group_sizes,
    *,
    has_zeros_beyond=False,
    **options,
) -> jax.Array:
    """Compute `ragged_dot` with its options and, beside them, fields of
    `RaggedProduct`.
    """
    # 1. Check the operands.
    op = "ragged_dot"
    group_sizes = _checks.group_sizes(op, group_sizes)
    # the gradient of a fused input, and the amax of its residual, read x
    if isinstance(lhs, FusedInput) and not has_zeros_beyond:
        lhs = dataclasses.replace(lhs, x=in_a_group(lhs.x, group_sizes))
    # rows beyond the last group would not be zeros: a norm adds its bias to them
    keeps_zeros = getattr(lhs, "bias", None) is None
    lhs, rhs = operand("ragged_dot: lhs", lhs), operand("ragged_dot: rhs", rhs)
    x, kernel, groups = lhs.array.shape, rhs.array.shape, group_sizes.size
    if len(x) != 2:
        raise ValueError(f"ragged_dot: lhs: expected [m, k], got {x}")
    if len(kernel) != 3 or kernel[:2] != (groups, x[1]):
        raise ValueError(
            f"ragged_dot: rhs: expected [{groups}, {x[1]}, n] to go with "
            f"lhs{list(x)} and {groups} group_sizes, got {kernel}"
        )
    # 2. Multiply.
    (y,) = multiply_operands(
        op,
        RaggedProduct,
        operands=(lhs, rhs),
        can_fuse=(keeps_zeros, False),
        group_sizes=group_sizes,
        dimension_numbers=(((1,), (1,)), ((), (0,))),  # the matrices are a batch
        has_zeros_beyond=has_zeros_beyond,
        **options,
    )
    return y


# Of `[m, k]` and `[g, n, k]`; for wgrad of `[k, m]` and `[n, m]`.
_NUMBERS = (
    lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0]),
    lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], []),
)


@dataclasses.dataclass(frozen=True)
class RaggedProduct(Product):
    """The static part of one product whose rows are cut into groups; x is lhs, the
    kernel is rhs.

    Attributes:
        has_zeros_beyond: whether the rows of x and of the gradient beyond the last
            group are zeros already.
    """

    has_zeros_beyond: bool = False

    names = ("ragged_dot: lhs", "ragged_dot: rhs")
    dims = ("m", "k"), ("g", "k", "n"), ("m", "n")

    def in_groups(self, x, group_sizes):
        """Set the rows of x beyond the last group to zero."""
        return x if self.has_zeros_beyond else in_a_group(x, group_sizes)

    def multiply_arrays(self, x, kernel, group_sizes, precision, dtype):
        """Return the product of two arrays in `dtype`."""
        sizes = _in_bounds(group_sizes, x.shape[0])
        return lax.ragged_dot(
            x, kernel, sizes, precision=precision, preferred_element_type=dtype
        )

    def gemm(self, gemm_type, a, b, out_dtype, swap=False, bias=None, group_sizes=None):
        """Return the product of two QTensors, which have the contracting dimension
        last.
        """
        del swap, bias  # ragged_dot has no bias, and its layouts need no transpose
        is_wgrad = gemm_type == GEMMType.WGRAD
        has_qgemm = any(quantizer.qgemm for quantizer in self.quantizers)
        for q in (a, b):
            if q.scale_inv is not None and (has_qgemm or not is_blockwise(q)):
                raise ValueError(
                    f"ragged_dot: recipe: {gemm_type}: expected high precision, or FP8 "
                    "codes with one scale or one for each block, without a qgemm; got "
                    f"codes of {q.data.dtype} with scales {q.scale_inv.shape} and "
                    f"block={q.block}"
                )
        if a.scale_inv is None or b.scale_inv is None:
            # JAX has no batching rule for most batches of this product: the examples
            # run one after the other.
            @jax.custom_batching.sequential_vmap
            def multiply(a, b, group_sizes):
                return lax.ragged_dot_general(
                    a,
                    b,
                    _in_bounds(group_sizes, a.shape[is_wgrad]),
                    _NUMBERS[is_wgrad],
                    preferred_element_type=promoted(a, jnp.float32),
                )

            y = multiply_values(multiply, a, b, out_dtype, group_sizes)
            return y.astype(out_dtype)
        return ops.ragged_matmul(
            a.data,
            b.data,
            a.scale_inv,
            b.scale_inv,
            group_sizes,
            ragged="contraction" if is_wgrad else "rows",
            b_t=b.data_t if b.has_one_code and not is_wgrad else None,
            a_block=a.block,
            b_block=b.block,
            precise=gemm_type in self.precise,
            out_dtype=out_dtype,
        )


def in_a_group(x, group_sizes):
    """Set the rows of x beyond the last group to zero, so that an amax does not include
    their values.
    """
    rows = jnp.sum(_in_bounds(group_sizes, x.shape[0]), dtype=jnp.int32)
    inside = lax.broadcasted_iota(jnp.int32, x.shape, 0) < rows
    return jnp.where(_mesh.placed_as(jax.typeof(x), inside), x, lax.full_like(x, 0))


def _in_bounds(group_sizes, rows):
    """Return sizes of which none is below 0: all products, in FP8 or not, read the same
    rows.
    """
    return jnp.clip(group_sizes, 0, rows)
