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

from ..recipes import AmaxReduction, DotGeneralState, GEMMType, QTensor, QuantizerRun, column_sums, finish, start
from ._layout import layouts
from ._operand import Operand, matmul, operands

# Name for rematerialization policies (checkpoint_policies.py).
RESIDUAL_NAME = "jaxfp8_residual"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about one product.

    Attributes:
        quantizers: of x, kernel, grad, y and the gradient of x; None is high precision.
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

    def gemm(self, gemm_type, a, b, out_dtype, contracting, swap=False, bias=None):
        """`a @ b.T` of two `Operand`, or its transpose `b @ a.T`."""
        of_x, of_kernel, of_grad = self.quantizers[:3]
        first, second = {
            GEMMType.FPROP: (of_x, of_kernel),
            GEMMType.DGRAD: (of_grad, of_kernel),
            GEMMType.WGRAD: (of_x, of_grad),
        }[gemm_type]
        return matmul(
            a,
            b,
            gemm_type=gemm_type,
            qgemm=getattr(first, "qgemm", None) or getattr(second, "qgemm", None),
            out_dtype=out_dtype,
            precise=gemm_type in self.precise,
            batch=len(self.dimension_numbers[1][0]),
            contracting=contracting,
            bias=bias,
            swap=swap,
        )

    def quantized(self, i, x, run, **options):
        """`(QTensor, run, sums)` of a tensor by quantizer `i`; see `Quantizer.quantize_operand`."""
        quantizer = self.quantizers[i]
        if quantizer is None:
            rows, cols = options["rows"], options["cols"]
            return QTensor(x, None, cols=cols), None, column_sums(x, rows, cols) if options.get("sums") else None
        return quantizer.quantize_operand(x, run, reduce=self.reduce, **options)

    def rounded(self, i, x, run, cols):
        """`(x, run)`: a result that is quantized and dequantized at once, by quantizer `i` if there is one."""
        if self.quantizers[i] is None:
            return x, None
        batch = len(self.dimension_numbers[1][0])
        q, run, _ = self.quantized(i, x, run, rows=x.ndim - batch - cols, cols=cols, columnwise=False)
        return q.dequantize(x.dtype), run


def _per_member(function):
    """Maps `function(plan, ...)` over the leading axes that enumerate members."""

    @functools.wraps(function)
    def mapped(plan, *operands):
        if plan.members:
            return jax.vmap(functools.partial(mapped, plan.member()))(*operands)
        return function(plan, *operands)

    return mapped


def _in_order(codes: QTensor, layout, rows, cols, columnwise) -> QTensor:
    """Codes that were made before the product was known, in its order."""
    data, data_t = layout.ordered(codes.data), codes.data_t
    if not codes.has_one_scale:
        if data is not codes.data or cols != codes.cols or (data_t is None and layout.contract_first):
            raise ValueError(
                f"dot_general: kernel: a QTensor with a scale for each block of {codes.block} fits products that "
                f"contract its rows or its last {codes.cols} dimensions; quantize it inside of the product"
            )
        return codes
    if not columnwise:
        data_t = None
    elif data_t is None or data is not codes.data:
        batch = data.ndim - rows - cols
        order = (*range(batch), *range(batch + rows, data.ndim), *range(batch, batch + rows))
        data_t = jnp.transpose(data, order)
    return QTensor(data, codes.scale_inv, data_t, cols=cols)


def _kept(operand: Operand | None, run):
    """What the backward reads of an operand; a scale is kept once: in a loop every residual costs a copy."""
    if operand is None or not isinstance(run, QuantizerRun):
        return operand
    return dataclasses.replace(operand, scale_inv=None)


def _restored(kept: Operand | None, run):
    """The operand that `_kept` was given."""
    if kept is None or not isinstance(run, QuantizerRun):
        return kept
    return dataclasses.replace(kept, scale_inv=run.scale_inv)


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
        states = [getattr(state, field.name) for field in dataclasses.fields(state)]
        if wanted is None:
            states[2] = states[4] = None
        # The state of codes was read when they were made.
        states[:2] = (of if made is None else None for of, made in zip(states, codes, strict=False))
        runs = start(plan.quantizers, states)

        def quantize(i, x, layout, other):
            needs_first, contract_first = other in (wanted or ()), layout.contract_first
            options = layout.counts | {"columnwise": needs_first or contract_first}
            if codes[i] is None:
                options |= {"rowwise": needs_first or not contract_first, "contract_first": contract_first}
                q, run, _ = plan.quantized(i, layout.ordered(x), runs[i], **options)
            else:
                q, run = _in_order(codes[i], layout, **options), codes[i].run
            if isinstance(run, QuantizerRun):
                run = dataclasses.replace(run, scale=None, scale_inv=q.scale_inv, is_empty=None)
            last, first = operands(q, len(layout.batch), contract_first, want_first=needs_first)
            return last, _kept(first, run), run

        x_last, x_first, runs[0] = quantize(0, x, x_layout, "kernel")
        kernel_last, kernel_first, runs[1] = quantize(1, kernel, kernel_layout, "x")
        if bias is not None:
            batch = [x.shape[d] for d in plan.dimension_numbers[1][0]]
            bias = jnp.broadcast_to(bias.astype(plan.out_dtype), (*batch, *bias.shape))
        y = plan.gemm(GEMMType.FPROP, x_last, kernel_last, plan.out_dtype, len(x_layout.contract), bias=bias)
        y, runs[3] = plan.rounded(3, y, runs[3], len(kernel_layout.free))
        return y, (x_first, kernel_first, tuple(runs))

    y, residuals = of_member(plan, x, kernel, bias, state, codes)
    return y, checkpoint_name(residuals, RESIDUAL_NAME)


def backward(plan, x_shape, kernel_shape, wanted, residuals, grad):
    """`(dx, dkernel, dbias, next state)`; a gradient that is not wanted is None."""

    @_per_member
    def of_member(plan, residuals, grad):
        x_first, kernel_first, runs = residuals
        runs = list(runs)
        x_first, kernel_first = _restored(x_first, runs[0]), _restored(kernel_first, runs[1])
        x_layout, kernel_layout = layouts(x_shape, kernel_shape, plan.dimension_numbers)
        rows, cols = len(x_layout.free), len(kernel_layout.free)
        wants = {"rowwise": "x" in wanted, "columnwise": "kernel" in wanted}
        q, runs[2], dbias = plan.quantized(2, grad, runs[2], rows=rows, cols=cols, sums="bias" in wanted, **wants)
        grad_rows, grad_cols = operands(
            q, len(x_layout.batch), want_last=wants["rowwise"], want_first=wants["columnwise"]
        )
        dx = dkernel = None
        if "x" in wanted:
            swap = x_layout.contract_first
            dx = plan.gemm(GEMMType.DGRAD, grad_rows, kernel_first, plan.x_dtype, cols, swap=swap)
            dx, runs[4] = plan.rounded(4, dx, runs[4], len(x_layout.free if swap else x_layout.contract))
            dx = x_layout.restored(dx)
        if "kernel" in wanted:
            swap = not kernel_layout.contract_first
            dkernel = plan.gemm(GEMMType.WGRAD, x_first, grad_cols, plan.kernel_dtype, rows, swap=swap)
            dkernel = kernel_layout.restored(dkernel)
        if dbias is not None:
            dbias = jnp.sum(dbias, axis=tuple(range(dbias.ndim - cols)))
        if "x" not in wanted:
            runs[4] = None
        return dx, dkernel, dbias, DotGeneralState(*finish(runs, plan.reduce))

    x_shape, kernel_shape = x_shape[plan.members :], kernel_shape[plan.members :]
    return of_member(plan, residuals, grad)
