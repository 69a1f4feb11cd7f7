"""ragged_dot in FP8: `jax.lax.ragged_dot` with a recipe and a state, for mixtures of experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from .. import ops, recipes
from .._jax import _mesh
from ..ops import _checks
from ..ops._implementation import selected, using
from ..ops._ragged_matmul import sizes_of_groups
from ..recipes import DotGeneralState, GEMMType, HighPrecisionQuantizer, QTensor, Recipe
from ._dot_general import checked_quantizers
from ._fused_input import Activated, Normalized
from ._gemms import RESIDUAL_NAME
from ._product import OUTPUT_NAME, warn_of_state
from ._shared_state import shared
from ._vmapped_state import vmapped_state
from ._wrapping import wrapped


def ragged_dot(
    lhs: ArrayLike | Activated | Normalized,
    rhs: ArrayLike | QTensor,
    group_sizes: ArrayLike,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Compute `jax.lax.ragged_dot` with both operands, and the gradient of the output, in FP8.

    The rows of `lhs` are cut into consecutive groups, and each is multiplied with a matrix of its own:

        y[begin:end] = q(lhs)[begin:end] @ q(rhs)[e]     for group e, of group_sizes[e] rows

    Rows beyond the last group give zeros and get no gradient. What they hold does not matter: they are set to zero
    before anything looks for an amax, in lhs and in the gradient of the output. Scales, straight-through gradients and
    state are those of `jaxfp8.dot_general`: one scale for lhs, one for all of rhs, one for the gradient of the output.
    **The cotangent of `state` is the next state**: overwrite with it, never add it.

    Args:
        lhs: bfloat16, float16 or float32 `[m, k]`; the `input`.
        rhs: bfloat16, float16 or float32 `[g, k, n]`; the `kernel`. In float32 it gets its gradient in float32.
        group_sizes: int32 `[g]`, of sum at most m; values on the device, that nothing waits for.
        recipe: for example `DelayedScaling()`.
        state: `init_state(recipe)`, or what the last step returned. `DotGeneralState(None, None, None)` keeps none.
            Under `vmap` each member of a batch has its own scales; a state that they share combines by max. What they
            share of lhs and rhs is copied for each.
        preferred_element_type: dtype of the result; without it `jnp.result_type(lhs, rhs)`.

    Returns:
        `[m, n]`.

    Raises:
        TypeError: a dtype is not one of these; the state is not one; second derivatives and forward mode.
        ValueError: shapes do not fit, the state is missing or of another shape or history length, or the recipe has
            more than one scale a tensor.
    """
    op = "ragged_dot"
    lhs, rhs = _checks.high_precision(op, "lhs", lhs), _checks.high_precision(op, "rhs", rhs)
    group_sizes = sizes_of_groups(op, group_sizes)
    if lhs.ndim != 2:
        raise ValueError(f"{op}: lhs: expected [m, k], got {lhs.shape}")
    if rhs.ndim != 3 or rhs.shape[:2] != (group_sizes.size, lhs.shape[1]):
        raise ValueError(
            f"{op}: rhs: expected [{group_sizes.size}, {lhs.shape[1]}, n] to go with lhs{list(lhs.shape)} and "
            f"{group_sizes.size} group_sizes, got {rhs.shape}"
        )
    quantizers, state = checked_quantizers(op, recipe, state)
    tensorwise, results = quantizers[:3], quantizers[3:]
    if not all(quantizer.has_one_scale for quantizer in tensorwise) or set(results) != {HighPrecisionQuantizer()}:
        raise ValueError(
            f"{op}: recipe: expected one scale for each tensor, DelayedScaling or Float8CurrentScaling, got {recipe!r}"
        )
    if preferred_element_type is None:
        with jax.numpy_dtype_promotion("standard"):
            preferred_element_type = jnp.result_type(lhs, rhs)
    out_dtype = _checks.dtype(op, "preferred_element_type", preferred_element_type, _checks.HIGH_PRECISION)
    if 0 in lhs.shape or 0 in rhs.shape:  # there is no element: gradients are zero, the state is not touched
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), out_dtype)

    reduce = recipes.AmaxReduction.for_recipe(recipe)
    product = _RaggedProduct(tensorwise, out_dtype, frozenset(recipe.precise), reduce, selected())
    # JAX would add up the cotangents of the uses of a state, and of examples that share it. Here they meet in a max.
    state = vmapped_state(shared(state), lhs, rhs, group_sizes)
    multiply = wrapped(functools.partial(_fp8, product), _float32)
    return checkpoint_name(multiply(lhs, rhs, group_sizes, state), OUTPUT_NAME)


def _float32(lhs, rhs, group_sizes, state):
    """Multiply the operands as they are, in float32."""
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    return lax.ragged_dot(lhs, rhs, group_sizes, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _RaggedProduct:
    """The static part of one product.

    Attributes:
        quantizers: of lhs, rhs and the gradient of the output.
        out_dtype: of the result.
        precise: the products that accumulate precisely.
        reduce: `(amax, state) -> amax`, over the mesh.
        implementation: of the ops, also in the backward.
    """

    quantizers: tuple
    out_dtype: np.dtype
    precise: frozenset
    reduce: recipes.AmaxReduction
    implementation: str | None

    def gemm(self, gemm_type: GEMMType, a, b, a_scale_inv, b_scale_inv, group_sizes, out_dtype):
        """Multiply codes that have the contracting dimension last."""
        ragged = "contraction" if gemm_type == GEMMType.WGRAD else "rows"
        options = {"ragged": ragged, "out_dtype": out_dtype, "precise": gemm_type in self.precise}
        return ops.ragged_matmul(a, b, a_scale_inv, b_scale_inv, group_sizes, **options)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types of the operands, for their gradients."""

    lhs: jax.core.AbstractValue
    rhs: jax.core.AbstractValue


def _in_a_group(x, group_sizes):
    """Set the rows of x beyond the last group to zero: whatever they hold, an amax must not include it."""
    rows = jnp.sum(jnp.clip(group_sizes, 0, x.shape[0]))
    inside = lax.broadcasted_iota(jnp.int32, x.shape, 0) < rows
    return jnp.where(_mesh.placed_as(jax.typeof(x), inside), x, lax.full_like(x, 0))


def _forward(product, lhs, rhs, group_sizes, state: DotGeneralState, differentiated):
    """Compute y and the residuals; `differentiated` has the operands that get a gradient, None without a backward."""
    needs_dlhs, needs_drhs = (name in (differentiated or ()) for name in ("lhs", "rhs"))
    # Without a backward nothing quantizes a gradient, so the state of its quantizer is not read.
    states = (state.input, state.kernel, None if differentiated is None else state.output_grad)
    lhs_step, rhs_step, grad_step = recipes.read_states(product.quantizers, states, recipes.reading_of(state))
    lhs_quantizer, rhs_quantizer, _ = product.quantizers
    x = _in_a_group(lhs, group_sizes)
    options = recipes.OperandOptions(columnwise=needs_drhs, reduce=product.reduce)
    lhs, _ = lhs_quantizer.quantize_operand(x, lhs_step, options)
    # fprop contracts k, which is not the last dimension of rhs: it always reads the transposed layout.
    rhs, _ = rhs_quantizer.quantize_operand(rhs, rhs_step, options._replace(columnwise=True))
    scales = lhs.scale_inv, rhs.scale_inv
    y = product.gemm(GEMMType.FPROP, lhs.data, rhs.data_t, *scales, group_sizes, product.out_dtype)
    # wgrad reads lhs with its rows last, dgrad rhs with its columns last.
    lhs = dataclasses.replace(lhs, data=None) if needs_drhs else lhs.for_next_state()
    rhs = dataclasses.replace(rhs, data_t=None) if needs_dlhs else rhs.for_next_state()
    return y, (lhs, rhs, grad_step, recipes.reading_of(state))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fp8(product, lhs, rhs, group_sizes, state):
    with using(product.implementation):
        return _forward(product, lhs, rhs, group_sizes, state, None)[0]


def _fp8_fwd(product, lhs, rhs, group_sizes, state):
    # With symbolic zeros JAX says which operands get a gradient; the others need no residual.
    differentiated = [name for name, operand in (("lhs", lhs), ("rhs", rhs)) if operand.perturbed]
    leaves = jax.tree.leaves(state)
    # A gradient that leaves out the state leaves the scales as they are, for all of the training.
    warn_of_state(product.quantizers, [leaf.perturbed for leaf in leaves])
    lhs, rhs, group_sizes = lhs.value, rhs.value, group_sizes.value
    state = jax.tree.map(lambda leaf: leaf.value, state)
    with using(product.implementation):
        y, residuals = _forward(product, lhs, rhs, group_sizes, state, differentiated)
    types = _Types(jax.typeof(lhs), jax.typeof(rhs))
    return y, (checkpoint_name(residuals, RESIDUAL_NAME), group_sizes, types)


def _fp8_bwd(product, residuals, grad):
    """Compute, for each group, dlhs = grad @ rhs.T and drhs = lhs.T @ grad."""
    (lhs, rhs, grad_step, reading), group_sizes, types = residuals
    # A gradient of zeros is quantized all the same: lhs and rhs have run, so their states have next values.
    if isinstance(grad, SymbolicZero):
        grad = jnp.zeros(grad.shape, grad.dtype)
    dlhs = drhs = None
    # The forward has kept the layouts that gradients read, so the residuals tell which gradients there are.
    needs_dlhs, needs_drhs = rhs.data is not None, lhs.data_t is not None
    with using(product.implementation):
        x = _in_a_group(grad, group_sizes)
        options = recipes.OperandOptions(columnwise=needs_drhs, reduce=product.reduce)
        q, _ = product.quantizers[2].quantize_operand(x, grad_step, options)
        next_state = DotGeneralState(*recipes.next_states([lhs, rhs, q], product.reduce, reading))
        if needs_dlhs:
            scales = q.scale_inv, rhs.scale_inv
            dlhs = product.gemm(GEMMType.DGRAD, q.data, rhs.data, *scales, group_sizes, types.lhs.dtype)
            # Inside `shard_map` the cotangent of a replicated operand is the sum over the devices.
            dlhs = _mesh.cotangent_of(types.lhs, dlhs)
        if needs_drhs:
            scales = lhs.scale_inv, q.scale_inv
            drhs = product.gemm(GEMMType.WGRAD, lhs.data_t, q.data_t, *scales, group_sizes, types.rhs.dtype)
            drhs = _mesh.cotangent_of(types.rhs, drhs)
    # Group sizes are integers, which have no cotangent.
    return dlhs, drhs, None, next_state


_fp8.defvjp(_fp8_fwd, _fp8_bwd, symbolic_zeros=True)
