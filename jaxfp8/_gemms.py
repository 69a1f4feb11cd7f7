"""The three products of a layer as FP8 GEMMs: what each quantizes, reads and keeps.

fprop   y       = x      @ kernel
dgrad   dx      = grad   @ kernel.T
wgrad   dkernel = x.T    @ grad
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from . import ops
from ._layout import layouts
from ._mesh import AmaxReduction
from .recipes import DotGeneralState, finish, start
from .tensor import QTensor

# Name for rematerialization policies (checkpoint_policies.py).
RESIDUAL_NAME = "jaxfp8_residual"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one product.

    Attributes:
        quantizers: of x, kernel and grad.
        dimension_numbers: as of `lax.dot_general`, of one member.
        members: how many leading axes of x, kernel and every leaf of the state enumerate independent products.
        x_dtype, kernel_dtype: of the operands, and so of their gradients.
        out_dtype: of the result.
        out_sharding: PartitionSpec of the result on a mesh with explicit axes, of one member; None leaves it to JAX.
        precise: the products that accumulate precisely.
        reduce: `(amax, state) -> amax`, over the mesh; see _mesh.AmaxReduction.
    """

    quantizers: tuple
    dimension_numbers: tuple
    members: int
    x_dtype: np.dtype
    kernel_dtype: np.dtype
    out_dtype: np.dtype
    out_sharding: jax.sharding.PartitionSpec | None
    precise: frozenset
    reduce: AmaxReduction

    def member(self) -> "Plan":
        return dataclasses.replace(self, members=self.members - 1)

    def gemm(self, name, a, b, out_dtype, contracting, swap=False, bias=None):
        """`a @ b.T` of `(codes, scale_inv, codes in the other layout or None)`, or its transpose `b @ a.T`."""
        (a, a_scale_inv, a_t), (b, b_scale_inv, b_t) = (b, a) if swap else (a, b)
        batch = len(self.dimension_numbers[1][0])
        return ops.scaled_matmul(
            a,
            b,
            a_scale_inv,
            b_scale_inv,
            bias=bias,
            out_dtype=out_dtype,
            precise=name in self.precise,
            batch=batch,
            contracting=contracting,
            a_t=a_t,
            b_t=b_t,
        )


def _per_member(function):
    """Maps `function(plan, ...)` over the leading axes that enumerate members."""

    @functools.wraps(function)
    def mapped(plan, *operands):
        if plan.members:
            return jax.vmap(functools.partial(mapped, plan.member()))(*operands)
        return function(plan, *operands)

    return mapped


def _views(q, contract_first):
    """Codes with the contracting dimensions last, for fprop, and with them first, for the backward."""
    return (q.data_t, q.data) if contract_first else (q.data, q.data_t)


def _in_order(codes: QTensor, layout, rows, cols, transpose) -> QTensor:
    """Codes that were made before the product was known, in its order."""
    data, data_t = layout.ordered(codes.data), codes.data_t
    if not transpose:
        data_t = None
    elif data_t is None or data is not codes.data:
        batch = data.ndim - rows - cols
        order = (*range(batch), *range(batch + rows, data.ndim), *range(batch, batch + rows))
        data_t = jnp.transpose(data, order)
    return QTensor(data, codes.scale_inv, data_t)


def _with_scale(kept, run):
    """`(codes, scale_inv, None)` of an operand that the backward reads; else None."""
    return None if kept is None else (kept[0], kept[1] if run is None else run.scale_inv, None)


def forward(plan, x, kernel, bias, state: DotGeneralState, codes, wanted):
    """y, and what the backward reads.

    Args:
        plan, x, kernel, state: of the product.
        bias: of the free dimensions of kernel; or None.
        codes: of x and of kernel, a QTensor where one was quantized before; else None.
        wanted: the operands, out of `"x"`, `"kernel"` and `"bias"`, whose gradients are wanted; None where there is no
            backward. An operand is read again for the gradient of the other one: without it the second FP8 layout is
            not written.

    Returns:
        `(y, residuals)`. The residuals carry names for remat. They hold what the quantizers of x and kernel have seen
        as well: without that a policy that keeps the codes would quantize again for an amax.
    """

    @_per_member
    def of_member(plan, x, kernel, bias, state, codes):
        x_layout, kernel_layout = layouts(x.shape, kernel.shape, plan.dimension_numbers)
        states = [state.input, state.kernel] + ([] if wanted is None else [state.output_grad])
        # The state of codes was read when they were made.
        states[:2] = (of if made is None else None for of, made in zip(states, codes, strict=False))
        runs = start(plan.quantizers[: len(states)], states)

        def quantize(i, operand, layout, other):
            needs_first = other in (wanted or ())
            options = layout.counts | {"transpose": needs_first or layout.contract_first}
            if codes[i] is None:
                q, run, _ = plan.quantizers[i].quantize(layout.ordered(operand), runs[i], **options, reduce=plan.reduce)
            else:
                q, run = _in_order(codes[i], layout, **options), codes[i].run
            last, first = _views(q, layout.contract_first)
            first = first if needs_first else None
            # Kept once each: in a loop every residual costs a copy into its stack.
            if run is not None:
                run = dataclasses.replace(run, scale=None, scale_inv=q.scale_inv, is_empty=None)
            kept = None if first is None else (first, q.scale_inv if run is None else None)
            # The backward reads the other layout: if codes have to cross devices, it is that one, once.
            return (last, q.scale_inv, first), kept, run

        x_last, x_first, x_run = quantize(0, x, x_layout, "kernel")
        kernel_last, kernel_first, kernel_run = quantize(1, kernel, kernel_layout, "x")
        if bias is not None:
            batch = [x.shape[d] for d in plan.dimension_numbers[1][0]]
            bias = jnp.broadcast_to(bias.astype(plan.out_dtype), (*batch, *bias.shape))
        y = plan.gemm("fprop", x_last, kernel_last, plan.out_dtype, len(x_layout.contract), bias=bias)
        return y, (x_first, kernel_first, (x_run, kernel_run, *runs[2:]))

    y, residuals = of_member(plan, x, kernel, bias, state, codes)
    return y, checkpoint_name(residuals, RESIDUAL_NAME)


def backward(plan, x_shape, kernel_shape, wanted, residuals, grad):
    """`(dx, dkernel, dbias, next state)`; a gradient that is not wanted is None."""

    @_per_member
    def of_member(plan, residuals, grad):
        x_first, kernel_first, (x_run, kernel_run, grad_run) = residuals
        x_first, kernel_first = _with_scale(x_first, x_run), _with_scale(kernel_first, kernel_run)
        x_layout, kernel_layout = layouts(x_shape, kernel_shape, plan.dimension_numbers)
        rows, cols = len(x_layout.free), len(kernel_layout.free)
        q_grad, grad_run, dbias = plan.quantizers[2].quantize(
            grad,
            grad_run,
            rows=rows,
            cols=cols,
            transpose="kernel" in wanted,
            sums="bias" in wanted,
            reduce=plan.reduce,
        )
        grad_rows = (q_grad.data, q_grad.scale_inv, q_grad.data_t)
        dx = dkernel = None
        if "x" in wanted:
            swap = x_layout.contract_first
            dx = plan.gemm("dgrad", grad_rows, kernel_first, plan.x_dtype, cols, swap=swap)
            dx = x_layout.restored(dx)
        if "kernel" in wanted:
            swap = not kernel_layout.contract_first
            grad_cols = (q_grad.data_t, q_grad.scale_inv, None)
            dkernel = plan.gemm("wgrad", x_first, grad_cols, plan.kernel_dtype, rows, swap=swap)
            dkernel = kernel_layout.restored(dkernel)
        if dbias is not None:
            dbias = jnp.sum(dbias, axis=tuple(range(dbias.ndim - cols)))
        return dx, dkernel, dbias, DotGeneralState(*finish([x_run, kernel_run, grad_run], plan.reduce))

    x_shape, kernel_shape = x_shape[plan.members :], kernel_shape[plan.members :]
    return of_member(plan, residuals, grad)
