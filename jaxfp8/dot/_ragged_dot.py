"""ragged_dot in FP8: `jax.lax.ragged_dot` with a recipe and a state, for mixtures of experts."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike, DTypeLike

from .. import ops
from .._jax import _mesh
from ..ops import _checks
from ..ops._implementation import selected, using
from ..ops._ragged_matmul import sizes_of_groups
from ..recipes import (
    AmaxReduction,
    DotGeneralState,
    FP8StateWarning,
    QTensor,
    Recipe,
    TensorwiseQuantizer,
    finish,
    start,
)
from . import _probe
from ._dot_general import checked_quantizers
from ._fused_input import Activated, Normalized
from ._gemms import RESIDUAL_NAME
from ._members import own_state
from ._product import NOT_UPDATED, OUTPUT_NAME
from ._shared_state import shared


def ragged_dot(
    lhs: ArrayLike | Activated | Normalized,
    rhs: ArrayLike | QTensor,
    group_sizes: ArrayLike,
    *,
    recipe: Recipe | None,
    state: DotGeneralState | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with both operands, and the gradient of the output, in FP8.

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
    if not all(isinstance(quantizer, TensorwiseQuantizer) for quantizer in quantizers[:3]) or any(quantizers[3:]):
        raise ValueError(
            f"{op}: recipe: expected one scale for each tensor, DelayedScaling or Float8CurrentScaling, got {recipe!r}"
        )
    if preferred_element_type is None:
        with jax.numpy_dtype_promotion("standard"):
            preferred_element_type = jnp.result_type(lhs, rhs)
    out_dtype = _checks.dtype(op, "preferred_element_type", preferred_element_type, _checks.HIGH_PRECISION)
    if 0 in lhs.shape or 0 in rhs.shape:  # nothing to see: gradients are zero, the state is not touched
        return jnp.zeros((lhs.shape[0], rhs.shape[2]), out_dtype)

    plan = _Plan(quantizers, out_dtype, frozenset(recipe.precise), AmaxReduction.of(recipe), selected())
    state = own_state(shared(state), lhs, rhs, group_sizes)
    y = _probe.product(functools.partial(_product, plan), _exact, lhs, rhs, group_sizes, state)
    return checkpoint_name(y, OUTPUT_NAME)


def _exact(lhs, rhs, group_sizes, state):
    """The product in float32, of operands as they are."""
    del state
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    return lax.ragged_dot(lhs, rhs, group_sizes, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static about one product.

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
    reduce: AmaxReduction
    implementation: str | None

    def quantize(self, index: int, x, run, *, transpose: bool):
        """`(QTensor, run)` of operand `index`."""
        q, run, _ = self.quantizers[index].quantize_operand(x, run, columnwise=transpose, reduce=self.reduce)
        return q, run

    def gemm(self, name: str, a, b, group_sizes, out_dtype):
        """A product of `(codes, scale_inv)`, both with the contracting dimension last."""
        return ops.ragged_matmul(
            a[0],
            b[0],
            a[1],
            b[1],
            group_sizes,
            ragged="contraction" if name == "wgrad" else "rows",
            out_dtype=out_dtype,
            precise=name in self.precise,
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """The types of the operands, for their gradients."""

    lhs: jax.core.AbstractValue
    rhs: jax.core.AbstractValue


def _in_a_group(x, group_sizes):
    """`x` with zeros in the rows beyond the last group: whatever they hold, an amax must not see it."""
    rows = jnp.sum(jnp.clip(group_sizes, 0, x.shape[0]))
    inside = lax.broadcasted_iota(jnp.int32, x.shape, 0) < rows
    return jnp.where(_mesh.placed_as(jax.typeof(x), inside), x, lax.full_like(x, 0))


def _forward(plan, lhs, rhs, group_sizes, state: DotGeneralState, wanted):
    """y, and what the backward reads; `wanted` has the operands whose gradients are wanted, None without a backward."""
    states = (state.input, state.kernel, state.output_grad)[: 2 if wanted is None else 3]
    lhs_run, rhs_run, *grad_run = start(plan.quantizers[: len(states)], states)
    q_lhs, lhs_run = plan.quantize(0, _in_a_group(lhs, group_sizes), lhs_run, transpose="rhs" in (wanted or ()))
    q_rhs, rhs_run = plan.quantize(1, rhs, rhs_run, transpose=True)
    y = plan.gemm("fprop", (q_lhs.data, q_lhs.scale_inv), (q_rhs.data_t, q_rhs.scale_inv), group_sizes, plan.out_dtype)
    lhs_t = (q_lhs.data_t, q_lhs.scale_inv) if "rhs" in (wanted or ()) else None
    rhs_rows = (q_rhs.data, q_rhs.scale_inv) if "lhs" in (wanted or ()) else None
    return y, (lhs_t, rhs_rows, (lhs_run, rhs_run, *grad_run))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan, lhs, rhs, group_sizes, state):
    with using(plan.implementation):
        return _forward(plan, lhs, rhs, group_sizes, state, None)[0]


def _product_fwd(plan, lhs, rhs, group_sizes, state):
    is_wanted = {"lhs": lhs.perturbed, "rhs": rhs.perturbed}
    wanted = tuple(name for name, perturbed in is_wanted.items() if perturbed)
    leaves = jax.tree.leaves(state)
    if leaves and not any(leaf.perturbed for leaf in leaves):
        warnings.warn(NOT_UPDATED, FP8StateWarning, stacklevel=1)
    lhs, rhs, group_sizes = lhs.value, rhs.value, group_sizes.value
    state = jax.tree.map(lambda leaf: leaf.value, state)
    with using(plan.implementation):
        y, residuals = _forward(plan, lhs, rhs, group_sizes, state, wanted)
    types = _Types(jax.typeof(lhs), jax.typeof(rhs))
    return y, (checkpoint_name(residuals, RESIDUAL_NAME), group_sizes, types)


def _product_bwd(plan, kept, grad):
    """dlhs = grad @ rhs.T, of each group; drhs = lhs.T @ grad, of each group."""
    (lhs_t, rhs_rows, (*runs, grad_run)), group_sizes, types = kept
    if isinstance(grad, SymbolicZero):
        grad = jnp.zeros(grad.shape, grad.dtype)
    dlhs = drhs = None
    with using(plan.implementation):
        q_grad, grad_run = plan.quantize(2, _in_a_group(grad, group_sizes), grad_run, transpose=lhs_t is not None)
        next_state = DotGeneralState(*finish([*runs, grad_run], plan.reduce))
        if rhs_rows is not None:
            dlhs = plan.gemm("dgrad", (q_grad.data, q_grad.scale_inv), rhs_rows, group_sizes, types.lhs.dtype)
            dlhs = _mesh.cotangent_of(types.lhs, dlhs)
        if lhs_t is not None:
            grad_t = (q_grad.data_t, q_grad.scale_inv)
            drhs = plan.gemm("wgrad", lhs_t, grad_t, group_sizes, types.rhs.dtype)
            drhs = _mesh.cotangent_of(types.rhs, drhs)
    return dlhs, drhs, None, next_state


_product.defvjp(_product_fwd, _product_bwd, symbolic_zeros=True)
