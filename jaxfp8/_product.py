"""The FP8 product as a JAX primitive: three GEMMs, straight-through gradients, the next state as the state's cotangent.

fprop   y       = x      @ kernel
dgrad   dx      = grad   @ kernel.T
wgrad   dkernel = x.T    @ grad

A primitive, because then `vmap` is a change of dimension numbers, as for `lax.dot_general`: a batch that shares its
state is one larger product with one amax per operand, also in the backward. `custom_vjp` would compute and sum a kernel
gradient for every member.
"""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import ops
from ._layout import layouts
from .ops._implementation import selected, using
from .ops._primitive import compiled
from .recipes import DotGeneralState

# Names for rematerialization policies (checkpoint_policies.py).
RESIDUAL_NAME = "jaxfp8_residual"
OUTPUT_NAME = "jaxfp8_gemm_output"


class FP8StateWarning(UserWarning):
    """FP8 state that this gradient can never update."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one product.

    Attributes:
        quantizers: of x, kernel and grad.
        dimension_numbers: as of `lax.dot_general`, of one member.
        members: how many leading axes of x, kernel and every leaf of the state enumerate independent products.
        x_dtype, kernel_dtype: of the operands, and so of their gradients.
        out_dtype: of the result.
        precise: the products that accumulate precisely.
    """

    quantizers: tuple
    dimension_numbers: tuple
    members: int
    x_dtype: np.dtype
    kernel_dtype: np.dtype
    out_dtype: np.dtype
    precise: frozenset

    def member(self) -> "Plan":
        return dataclasses.replace(self, members=self.members - 1)

    def gemm(self, name, a, b, out_dtype, swap=False):
        """`a @ b.T` of `(codes, scale_inv)` pairs, or its transpose `b @ a.T`."""
        (a, a_scale_inv), (b, b_scale_inv) = (b, a) if swap else (a, b)

        return ops.scaled_matmul(a, b, a_scale_inv, b_scale_inv, out_dtype=out_dtype, precise=name in self.precise)


def product(plan: Plan, x, kernel, state: DotGeneralState):
    """`y`; x and kernel as `lax.dot_general` takes them."""
    leaves, tree = jax.tree.flatten(state)
    return _product_p.bind(x, kernel, *leaves, plan=plan, tree=tree, implementation=selected())


# ------------------------------------------------------------------------------------------------- the three products


def _per_member(function):
    """Maps `function(plan, ...)` over the leading axes that enumerate members."""

    @functools.wraps(function)
    def mapped(plan, *operands):
        if plan.members:
            return jax.vmap(functools.partial(mapped, plan.member()))(*operands)
        return function(plan, *operands)

    return mapped


def _views(q, contract_first):
    """`(codes, scale_inv)` with the contracting dimension last, for fprop, and with it first, for the backward."""
    last, first = (q.data_t, q.data) if contract_first else (q.data, q.data_t)
    return (last, q.scale_inv), (first, q.scale_inv)


@_per_member
def _forward(plan, x, kernel, state):
    """y alone: an operand is transposed only where fprop needs that."""
    x_layout, kernel_layout, out_shape = layouts(x.shape, kernel.shape, plan.dimension_numbers)
    q_x, _ = plan.quantizers[0].quantize(x_layout.to_matrices(x), state.input, transpose=x_layout.contract_first)
    q_kernel, _ = plan.quantizers[1].quantize(
        kernel_layout.to_matrices(kernel), state.kernel, transpose=kernel_layout.contract_first
    )
    x_last, _ = _views(q_x, x_layout.contract_first)
    kernel_last, _ = _views(q_kernel, kernel_layout.contract_first)
    return plan.gemm("fprop", x_last, kernel_last, plan.out_dtype).reshape(out_shape)


def _forward_with_residuals(plan, x, kernel, state, wanted):
    """y, and of each operand the FP8 layout that the backward reads; the next states of both quantizers.

    An operand is read again for the gradient of the other one: `wanted` has their names.
    """

    @_per_member
    def forward(plan, x, kernel, state):
        x_layout, kernel_layout, out_shape = layouts(x.shape, kernel.shape, plan.dimension_numbers)

        def quantize(quantizer, operand, layout, state, needs_first):
            transpose = needs_first or layout.contract_first
            q, next_state = quantizer.quantize(layout.to_matrices(operand), state, transpose=transpose)
            last, first = _views(q, layout.contract_first)
            return last, first if needs_first else None, next_state

        of_x, of_kernel, _ = plan.quantizers
        x_last, x_first, next_input = quantize(of_x, x, x_layout, state.input, "kernel" in wanted)
        kernel_last, kernel_first, next_kernel = quantize(of_kernel, kernel, kernel_layout, state.kernel, "x" in wanted)
        y = plan.gemm("fprop", x_last, kernel_last, plan.out_dtype).reshape(out_shape)
        return y, (x_first, kernel_first, next_input, next_kernel, state.output_grad)

    y, residuals = forward(plan, x, kernel, state)
    # The next states as well: without them a policy that keeps the codes would quantize again for an amax.
    return y, checkpoint_name(residuals, RESIDUAL_NAME)


def _backward(plan, x_shape, kernel_shape, wanted, residuals, grad):
    """`(dx, dkernel, next state)`; a gradient that is not wanted is None."""

    @_per_member
    def backward(plan, residuals, grad):
        x_first, kernel_first, next_input, next_kernel, output_grad = residuals
        x_layout, kernel_layout, _ = layouts(x_shape, kernel_shape, plan.dimension_numbers)
        rows = math.prod(x_layout.sizes(x_layout.free))
        groups = math.prod(x_layout.sizes(x_layout.batch))
        q_grad, next_output_grad = plan.quantizers[2].quantize(
            grad.reshape(groups, rows, -1), output_grad, transpose="kernel" in wanted
        )
        grad_rows, grad_cols = (q_grad.data, q_grad.scale_inv), (q_grad.data_t, q_grad.scale_inv)
        dx = dkernel = None
        if "x" in wanted:
            dx = plan.gemm("dgrad", grad_rows, kernel_first, plan.x_dtype, swap=x_layout.contract_first)
            dx = x_layout.from_matrices(dx)
        if "kernel" in wanted:
            dkernel = plan.gemm("wgrad", x_first, grad_cols, plan.kernel_dtype, swap=not kernel_layout.contract_first)
            dkernel = kernel_layout.from_matrices(dkernel)
        return dx, dkernel, DotGeneralState(next_input, next_kernel, next_output_grad)

    x_shape, kernel_shape = x_shape[plan.members :], kernel_shape[plan.members :]
    return backward(plan, residuals, grad)


# --------------------------------------------------------------------------------------------------------- primitives


def _primal(x, kernel, *leaves, plan, tree, implementation):
    with using(implementation):
        return _forward(plan, x, kernel, jax.tree.unflatten(tree, leaves))


def _abstract(x, kernel, *leaves, plan, tree, implementation):
    """The result as `lax.dot_general` types it: shape, sharding and varying axes."""
    del leaves, tree, implementation
    members = tuple(range(plan.members))
    contract, batch = ([tuple(d + plan.members for d in dims) for dims in pair] for pair in plan.dimension_numbers)
    dimension_numbers = (tuple(contract), tuple(members + dims for dims in batch))
    dot, _ = lax.dot_general_p.abstract_eval(
        x.update(dtype=plan.out_dtype),
        kernel.update(dtype=plan.out_dtype),
        dimension_numbers=dimension_numbers,
        precision=None,
        preferred_element_type=None,
        out_sharding=None,
    )
    return dot


def _batch(args, dims, *, plan, **params):
    """A batch that shares its state is a larger product; a batch of states is a batch of products.

    So is a batch of kernels without state: as in a loop, each then has the scale of its own amax.
    """
    x, kernel, *leaves = args
    x_dim, kernel_dim, *leaf_dims = dims
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if size == 0:
        out = jax.eval_shape(functools.partial(_product_p.bind, plan=plan, **params), *map(_without, args, dims))
        return jnp.zeros((0, *out.shape), out.dtype), 0
    state = jax.tree.unflatten(params["tree"], leaves)
    own_scales = kernel_dim is not None and None in (state.input, state.kernel, state.output_grad)
    if any(d is not None for d in leaf_dims) or own_scales:
        # A state that the members share is still one state: what comes back combines by max.
        repeats = [_repeat] * 2 + [_repeat_state] * len(leaves)
        leading = [
            repeat(size, a) if d is None else jnp.moveaxis(a, d, 0)
            for repeat, a, d in zip(repeats, args, dims, strict=True)
        ]
        return _product_p.bind(*leading, plan=dataclasses.replace(plan, members=plan.members + 1), **params), 0

    first = plan.members  # the batch comes right after the members
    (x_contract, kernel_contract), (x_batch, kernel_batch) = plan.dimension_numbers
    if x_dim is not None:
        x = jnp.moveaxis(x, x_dim, first)
        x_contract, x_batch = ([d + 1 for d in dims] for dims in (x_contract, x_batch))
    if kernel_dim is not None:
        kernel = jnp.moveaxis(kernel, kernel_dim, first)
        kernel_contract, kernel_batch = ([d + 1 for d in dims] for dims in (kernel_contract, kernel_batch))
    if x_dim is not None and kernel_dim is not None:
        x_batch, kernel_batch = (0, *x_batch), (0, *kernel_batch)
        out_dim = first
    elif x_dim is not None:  # a free dimension of x, its first
        out_dim = first + len(x_batch)
    else:
        out_dim = first + x.ndim - plan.members - len(x_contract)
    dimension_numbers = (
        (tuple(x_contract), tuple(kernel_contract)),
        (tuple(x_batch), tuple(kernel_batch)),
    )
    plan = dataclasses.replace(plan, dimension_numbers=dimension_numbers)
    return _product_p.bind(x, kernel, *leaves, plan=plan, **params), out_dim


def _without(x, dim):
    """The type of `x` without a dimension."""
    shape = x.shape if dim is None else x.shape[:dim] + x.shape[dim + 1 :]
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _repeat(size, x):
    return jnp.broadcast_to(x, (size, *x.shape))


_repeat_state = jax.custom_vjp(_repeat, nondiff_argnums=(0,))
_repeat_state.defvjp(lambda size, x: (_repeat(size, x), None), lambda size, _, ct: (jnp.max(ct, axis=0),))


_NOT_UPDATED = (
    "this gradient never updates FP8 state: it is not taken with respect to it, so scales stay what they are. "
    "Differentiate with respect to `_overwrite_with_gradient` (or the DotGeneralState) too, and store what comes back"
)


def _jvp(primals, tangents, *, plan, tree, implementation):
    """The products now, and a linear primitive that is only ever transposed."""
    x, kernel, *leaves = primals
    is_linear = tuple(type(t) is not ad.Zero for t in tangents)
    if leaves and not any(is_linear[2:]):
        warnings.warn(_NOT_UPDATED, FP8StateWarning, stacklevel=1)  # once: Python shows a line's warning once
    with using(implementation):
        y, residuals = _forward_with_residuals(plan, x, kernel, jax.tree.unflatten(tree, leaves), _wanted(is_linear))
    residuals, residual_tree = jax.tree.flatten(residuals)
    tangent = _linear_p.bind(
        *(t for t, linear in zip(tangents, is_linear, strict=True) if linear),
        *residuals,
        plan=plan,
        is_linear=is_linear,
        residual_tree=residual_tree,
        x_shape=x.shape,
        kernel_shape=kernel.shape,
        implementation=implementation,
        out=jax.typeof(y),
    )
    return y, tangent


def _wanted(is_linear) -> list[str]:
    """The operands that want a gradient."""
    return [name for name, linear in zip(("x", "kernel"), is_linear, strict=False) if linear]


def _transpose(grad, *args, plan, is_linear, residual_tree, x_shape, kernel_shape, implementation, out):
    del out
    residuals = jax.tree.unflatten(residual_tree, args[sum(is_linear) :])
    with using(implementation):
        dx, dkernel, next_state = _backward(plan, x_shape, kernel_shape, _wanted(is_linear), residuals, grad)
    cotangents = (dx, dkernel, *jax.tree.leaves(next_state))
    linear = [ct for ct, is_wanted in zip(cotangents, is_linear, strict=True) if is_wanted]
    return linear + [None] * (len(args) - len(linear))


def _only_reverse(*args, **params):
    del args, params
    raise TypeError(
        "jaxfp8.dot_general has first derivatives in reverse mode only (jax.grad, jax.vjp): jax.jvp, jax.linearize "
        "applied forward, jax.jacfwd, vmap of a jvp and second derivatives of an FP8 product would be silently wrong"
    )


_product_p = Primitive("fp8_product")
_product_p.def_abstract_eval(_abstract)
_product_p.def_impl(compiled(_product_p))
mlir.register_lowering(_product_p, mlir.lower_fun(_primal, multiple_results=False))
batching.primitive_batchers[_product_p] = _batch
ad.primitive_jvps[_product_p] = _jvp

_linear_p = Primitive("fp8_product_linear")
_linear_p.def_abstract_eval(lambda *args, out, **params: out)
ad.deflinear2(_linear_p, _transpose)
ad.primitive_jvps[_linear_p] = _only_reverse
batching.primitive_batchers[_linear_p] = _only_reverse
_linear_p.def_impl(_only_reverse)
mlir.register_lowering(_linear_p, _only_reverse)
