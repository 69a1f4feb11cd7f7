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
from .recipes import DotGeneralState
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

    def gemm(self, name, a, b, out_dtype, contracting, swap=False):
        """`a @ b.T` of `(codes, scale_inv, codes in the other layout or None)`, or its transpose `b @ a.T`."""
        (a, a_scale_inv, a_t), (b, b_scale_inv, b_t) = (b, a) if swap else (a, b)
        batch = len(self.dimension_numbers[1][0])
        return ops.scaled_matmul(
            a,
            b,
            a_scale_inv,
            b_scale_inv,
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


def forward(plan, x, kernel, state: DotGeneralState, codes: QTensor | None, wanted):
    """y, and what the backward reads.

    Args:
        plan, x, kernel, state: of the product.
        codes: of the kernel, with the next state of its quantizer, where it was quantized before; else None.
        wanted: the operands, `"x"` and `"kernel"`, whose gradients are wanted; None where there is no backward. An
            operand is read again for the gradient of the other one: without it the second FP8 layout is not written.

    Returns:
        `(y, residuals)`. The residuals carry names for remat, and hold the next states of x and kernel as well: without
        them a policy that keeps the codes would quantize again for an amax.
    """

    @_per_member
    def of_member(plan, x, kernel, state, codes):
        x_layout, kernel_layout = layouts(x.shape, kernel.shape, plan.dimension_numbers)

        def quantize(quantizer, operand, layout, state, codes, other):
            needs_first = other in (wanted or ())
            options = layout.counts | {"transpose": needs_first or layout.contract_first}
            if codes is None:
                q, next_state = quantizer.quantize(
                    layout.ordered(operand), state, **options, update=wanted is not None, reduce=plan.reduce
                )
            else:
                q, next_state = _in_order(codes, layout, **options), codes.next_state
            last, first = _views(q, layout.contract_first)
            first = first if needs_first else None
            # The backward reads the other layout: if codes have to cross devices, it is that one, once.
            return (last, q.scale_inv, first), None if first is None else (first, q.scale_inv), next_state

        of_x, of_kernel, _ = plan.quantizers
        x_last, x_first, next_input = quantize(of_x, x, x_layout, state.input, None, "kernel")
        kernel_last, kernel_first, next_kernel = quantize(of_kernel, kernel, kernel_layout, state.kernel, codes, "x")
        y = plan.gemm("fprop", x_last, kernel_last, plan.out_dtype, len(x_layout.contract))
        return y, (x_first, kernel_first, next_input, next_kernel, state.output_grad)

    y, residuals = of_member(plan, x, kernel, state, codes)
    return y, checkpoint_name(residuals, RESIDUAL_NAME)


def backward(plan, x_shape, kernel_shape, wanted, residuals, grad):
    """`(dx, dkernel, next state)`; a gradient that is not wanted is None."""

    @_per_member
    def of_member(plan, residuals, grad):
        x_first, kernel_first, next_input, next_kernel, output_grad = residuals
        x_layout, kernel_layout = layouts(x_shape, kernel_shape, plan.dimension_numbers)
        rows, cols = len(x_layout.free), len(kernel_layout.free)
        q_grad, next_output_grad = plan.quantizers[2].quantize(
            grad, output_grad, rows=rows, cols=cols, transpose="kernel" in wanted, reduce=plan.reduce
        )
        grad_rows = (q_grad.data, q_grad.scale_inv, q_grad.data_t)
        dx = dkernel = None
        if "x" in wanted:
            swap = x_layout.contract_first
            dx = plan.gemm("dgrad", grad_rows, (*kernel_first, None), plan.x_dtype, cols, swap=swap)
            dx = x_layout.restored(dx)
        if "kernel" in wanted:
            swap = not kernel_layout.contract_first
            grad_cols = (q_grad.data_t, q_grad.scale_inv, None)
            dkernel = plan.gemm("wgrad", (*x_first, None), grad_cols, plan.kernel_dtype, rows, swap=swap)
            dkernel = kernel_layout.restored(dkernel)
        return dx, dkernel, DotGeneralState(next_input, next_kernel, next_output_grad)

    x_shape, kernel_shape = x_shape[plan.members :], kernel_shape[plan.members :]
    return of_member(plan, residuals, grad)
