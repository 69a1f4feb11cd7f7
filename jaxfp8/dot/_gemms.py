"""The three products of a layer as FP8 GEMMs: the operands that each product quantizes,
reads and keeps.

fprop   y       = x      @ kernel
dgrad   dx      = grad   @ kernel.T
wgrad   dkernel = x.T    @ grad
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops, recipes
from ..ops._support import is_for_tpu, selected
from ..recipes import DotGeneralState, GEMMType, OperandOptions, QTensor, SharedCodes
from . import _contexts
from ._compute_dtype import promoted
from ._fused_input import (
    FusedInput,
    as_read_residual,
    as_residual,
    quantize_operand,
)
from ._high_precision import (
    is_blockwise,
    multiply_by,
    multiply_dequantized,
)
from ._layout import Layout, both_layouts, layouts


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part of one product.

    Attributes:
        quantizers: the quantizers of the recipe.
        dimension_numbers: as `lax.dot_general` takes them, without the vmapped
            dimensions.
        x_dtype: dtype of x, and so of its gradient.
        wgrad_dtype: dtype in which the kernel's gradient is written, and in which
            devices add it.
        out_dtype: dtype of the result.
        precise: names, out of fprop, dgrad and wgrad, of the products that accumulate
            precisely.
        reduce: reduces an amax over the devices that share the state.
        vmap_dims: number of leading dimensions of x, kernel and every leaf of the state
            that enumerate independent products.
        out_sharding: PartitionSpec of the result on a mesh with explicit axes, without
            the vmapped dimensions; None leaves it to JAX.
        activation: the activation that the result goes through, or None.
        fp8_residual: whether the backward of the activation reads codes of the result.
        records_grad: whether the state records the gradient of y; not where a transfer
            that brought it here has recorded it.
        is_pair: whether the kernel `[k, 2, n]` is a Pair: the halves of its gradient
            are read apart.
        layer: the path of the layer, for warnings, or None; equal products of two
            layers are one product.
        implementation: the implementation of the ops, where the product was made.
    """

    quantizers: recipes.ByQuantizer
    dimension_numbers: tuple
    x_dtype: np.dtype
    wgrad_dtype: np.dtype
    out_dtype: np.dtype
    precise: frozenset = frozenset()
    reduce: Callable[..., jax.Array] = recipes.no_reduction
    vmap_dims: int = 0
    out_sharding: jax.sharding.PartitionSpec | None = None
    activation: str | ops.ClampedSwiGLU | None = None
    fp8_residual: bool = False
    records_grad: bool = True
    is_pair: bool = False
    layer: str | None = dataclasses.field(
        default_factory=_contexts.current_layer, compare=False
    )
    implementation: str | None = dataclasses.field(default_factory=selected)

    # Names of the operands in messages.
    names = ("dot_general: x", "dot_general: kernel")
    # Dimensions of x, kernel and y of a product in groups, which no dimension numbers
    # describe.
    dims = None

    @property
    def batch(self) -> int:
        """Return the number of batch dimensions."""
        return len(self.dimension_numbers[1][0])

    def layouts(self, x_shape, kernel_shape) -> tuple[Layout, Layout]:
        """Return the layouts of operands of these shapes, without vmapped
        dimensions.
        """
        return layouts(x_shape, kernel_shape, self.dimension_numbers)

    def with_vmap_dims(self, more: int) -> "Product":
        """Return the product with `more` vmapped dimensions."""
        return dataclasses.replace(self, vmap_dims=self.vmap_dims + more)

    def in_groups(self, x, group_sizes):
        """Return x `[m, ...]`; a RaggedProduct sets the rows beyond its last group to
        zero.
        """
        return x

    def multiply_arrays(self, x, kernel, group_sizes, precision, dtype):
        """Return the product of two arrays in `dtype`."""
        del group_sizes
        return lax.dot_general(
            x,
            kernel,
            self.dimension_numbers,
            precision=precision,
            preferred_element_type=dtype,
            out_sharding=self.out_sharding,
        )

    def gemm(self, gemm_type, a, b, out_dtype, swap=False, bias=None, group_sizes=None):
        """Return `a @ b.T` of two QTensors, or with `swap` its transpose `b @ a.T`.

        Args:
            gemm_type: the GEMMType: fprop, dgrad or wgrad.
            a: a QTensor `[*batch, *m, *k]`, whose columns are k. `a.data_t`, if any, is
                a layout that another product reads as well.
            b: a QTensor `[*batch, *n, *k]`.
            out_dtype: bfloat16, float16 or float32.
            swap: whether to return the transpose.
            bias: bfloat16, float16 or float32 `[*n]`, or None; not with swap.
            group_sizes: int32 `[g]` of a RaggedProduct, else None.

        Returns:
            `[*batch, *m, *n]` of `out_dtype`; with swap `[*batch, *n, *m]`.
        """
        if bias is not None:
            batch = a.shape[: self.batch]
            bias = jnp.broadcast_to(bias.astype(out_dtype), (*batch, *bias.shape))
        first, second = self.quantizers.for_product(gemm_type)
        qgemm = first.qgemm or second.qgemm
        if qgemm is not None:
            return multiply_by(
                qgemm, a, b, gemm_type, out_dtype, self.batch, bias, swap
            )
        # The transpose of a product is the product of the operands exchanged: no kernel
        # has to transpose its result.
        if swap:
            a, b = b, a
        # Take the fastest kernel that reads both operands. Beside an operand with
        # blocks, a tensor with one scale is a matrix of one block; operands that no
        # kernel reads are dequantized.
        if a.is_tensorwise and b.is_tensorwise:
            return ops.scaled_matmul(
                a.data,
                b.data,
                a.scale_inv,
                b.scale_inv,
                a_t=a.data_t,
                b_t=b.data_t,
                bias=bias,
                out_dtype=out_dtype,
                precise=gemm_type in self.precise,
                batch=self.batch,
                contracting=a.cols,
                narrow_sums=gemm_type == GEMMType.WGRAD,
                by_halves=self.is_pair and gemm_type == GEMMType.WGRAD,
            )
        if is_blockwise(a) and is_blockwise(b):
            return ops.block_scaled_matmul(
                a.data,
                b.data,
                a.scale_inv,
                b.scale_inv,
                a_block=a.block,
                b_block=b.block,
                power_2_scale=a.power_2_scale and b.power_2_scale,
                bias=bias,
                out_dtype=out_dtype,
                precise=gemm_type in self.precise,
                batch=self.batch,
                contracting=a.cols,
            )
        return multiply_dequantized(a, b, out_dtype, self.batch, bias)

    def requantize(self, quantizer, y, scale, cols):
        """Quantize and dequantize the result y; return y and the QTensor for the next
        state, or None.
        """
        if quantizer == recipes.HighPrecisionQuantizer():
            return y, None
        options = OperandOptions(
            y.ndim - self.batch - cols, cols, columnwise=False, reduce=self.reduce
        )
        q, _ = quantizer.quantize_operand(y, scale, options)
        return q.dequantize(y.dtype), q.for_next_state()


def forward(
    product: Product,
    x,
    kernel,
    bias,
    state: DotGeneralState,
    codes,
    group_sizes,
    differentiated,
):
    """Compute y, and the residuals of the backward.

    Args:
        product: the static part.
        x, kernel: the operands, or the data of QTensors without a source.
        bias: shaped like the free dimensions of kernel; or None.
        state: the state of the product, as `recipes.read` gives it.
        codes: `(x, kernel)`: the QTensor of an operand that is already quantized; for x
            also the fused input, without gradient, that x is the value of; else None.
        group_sizes: see `Product.gemm`.
        differentiated: the operands, out of `"x"`, `"kernel"` and `"bias"`, that get a
            gradient; None where there is no backward. The gradient of one operand reads
            the other: a layout that no product reads is not written.

    Returns:
        `(y, (residuals, reading))`. The residuals are named for remat. They hold the
        amaxes of x and kernel too: a remat policy that keeps the codes then has no
        reason to quantize again. A reading has no name: a loop that runs over readings
        keeps no copy.
    """
    if product.vmap_dims:
        one = product.with_vmap_dims(-1)
        each = jax.vmap(lambda *operands: forward(one, *operands, differentiated))
        return each(x, kernel, bias, state, codes, group_sizes)
    x = x if codes[0] is not None else product.in_groups(x, group_sizes)
    layouts_of_both = product.layouts(x.shape, kernel.shape)
    # 1. Take the scales from the state.
    is_step, reading = differentiated is not None, recipes.reading_of(state)
    scales = recipes.scales_of(product.quantizers, state, has_backward=is_step)
    is_reread = reading is not None and recipes.reading_suffices(product.quantizers)

    # 2. Quantize both operands: fprop reads each with the contracting dimensions last,
    #    the backward with them first. The gradient of one reads the other.
    both = []
    for i, (operand, partner) in enumerate(((x, "kernel"), (kernel, "x"))):
        is_read_again = is_step and partner in differentiated
        q, residual, again = _operand(
            product, i, operand, layouts_of_both[i], codes[i], scales, is_read_again
        )
        # Codes from outside of the product stay as they are: a loop that runs over them
        # keeps no copy. The backward of a loop computes other scales from the reading.
        if not isinstance(codes[i], QTensor):
            residual = recipes.as_bytes(residual)
            if is_reread:
                residual = dataclasses.replace(residual, scale_inv=None)
        both.append((q, residual, again))
    operands, residuals, again = zip(*both, strict=True)

    # 3. Multiply.
    with _contexts.gemm(GEMMType.FPROP):
        y = product.gemm(
            GEMMType.FPROP,
            *operands,
            product.out_dtype,
            bias=bias,
            group_sizes=group_sizes,
        )
    cols = len(layouts_of_both[1].free)
    y, output = product.requantize(product.quantizers.output, y, scales.output, cols)
    grad_scales = [*scales.of_operand(2), scales.input_grad]
    amaxes = None
    recorded = [q.recorded for q in residuals if q.recorded is not None]
    if is_step and reading is not None and len(recorded) == 2:
        amaxes = jnp.concatenate(recorded)  # see `ops.join_recorded`
    if is_reread:
        grad_scales[0] = None
    kept = *residuals, *again, output, amaxes, *grad_scales
    return y, (as_residual(kept), reading)


def _operand(product, i, operand, layout, codes, scales, is_read_again):
    """Quantize x (i = 0) or the kernel (i = 1).

    Args:
        product: the static part.
        i: the position of the operand and of its quantizer.
        operand, layout: the array and its layout.
        codes: a QTensor or a fused input, or None, as in `forward`.
        scales: what all quantizers take, see `recipes.scales_of`.
        is_read_again: whether the backward reads the operand.

    Returns:
        `(q, residual, again)`: the operand of fprop; what the backward keeps of it; and
        codes for the backward that fprop does not read, or None.
    """
    quantizer, second_quantizer = product.quantizers.of_operand(i)
    scale, second_scale = scales.of_operand(i)
    # An operand that is codes alone serves both of its products.
    is_codes = isinstance(codes, QTensor) and codes.is_all_of(operand)
    shares_codes = is_codes or second_quantizer == SharedCodes()
    is_kept = is_read_again and shares_codes
    options = layout.options(
        columnwise=is_kept or layout.contract_first, reduce=product.reduce
    )
    # 1. Get the codes in the order of the product's dimensions.
    if codes is None:
        q, _ = quantizer.quantize_operand(layout.ordered(operand), scale, options)
    elif isinstance(codes, FusedInput):  # it has that order
        q, _ = quantize_operand(quantizer, codes, scale, options)
        # A policy that saves the codes has no reason to compute the input again.
        q = as_read_residual(q)
    else:
        q = _in_order(product.names[i], codes, layout, options)
        if i == 0 and is_kept and q.data_t is None and not q.has_one_code:
            q = _with_columnwise(q, product, options)
    # 2. Take the layouts of both products.
    batch, first = len(layout.batch), layout.contract_first
    last, residual = both_layouts(q, batch, first, is_kept)
    if is_kept and _is_turned_late(q):
        last = dataclasses.replace(last, data_t=None)
        residual = dataclasses.replace(q, data_t=None)
    again = None
    if is_read_again and not is_kept:
        # The second product has the contraction last.
        options = options._replace(columnwise=not first, contract_first=False)
        again, _ = second_quantizer.quantize_operand(
            layout.ordered(operand), second_scale, options
        )
        again = both_layouts(again, batch, first, True)[1]
        again = recipes.as_bytes(again)
    return last, residual, again


def backward(
    product: Product,
    x_shape,
    kernel_shape,
    differentiated,
    residuals,
    grad,
    group_sizes,
):
    """Compute `(dx, dkernel, dbias, cotangent of the state)`; None for a gradient of an
    operand that is not differentiated.

    Args:
        product: the static part.
        x_shape, kernel_shape: shapes of the operands, with the vmapped dimensions.
        differentiated: as in `forward`.
        residuals: `(residuals, reading)` of `forward`.
        grad: the gradient of y, or an ActivationGradient, which is computed and
            quantized in one pass.
        group_sizes: see `Product.gemm`.
    """
    if product.vmap_dims:
        one = product.with_vmap_dims(-1), x_shape[1:], kernel_shape[1:], differentiated
        each = jax.vmap(lambda *operands: backward(*one, *operands))
        return each(residuals, grad, group_sizes)
    grad = product.in_groups(grad, group_sizes)
    kept, reading = residuals
    x, kernel, x_again, kernel_again, output, amaxes, *grad_scales, input_grad_scale = (
        recipes.as_codes(kept)
    )
    x_scale = kernel_scale = None
    if reading is not None and recipes.reading_suffices(product.quantizers):
        x_scale, kernel_scale, grad_scales[0] = recipes.scales_of_reading(
            product.quantizers, reading
        )
    x_layout, kernel_layout = product.layouts(x_shape, kernel_shape)
    x = _read_again(x, x_scale, x_layout)
    kernel = _read_again(kernel, kernel_scale, kernel_layout)

    # 1. Quantize grad: dgrad contracts its columns, wgrad its rows.
    cols = len(kernel_layout.free)
    options = OperandOptions(len(x_layout.free), cols, reduce=product.reduce)
    rowwise, columnwise, grad_again, sums = _grad_operand(
        product, grad, grad_scales, options, differentiated
    )

    # 2. Multiply.
    dx = dkernel = dbias = input_grad = None
    if "x" in differentiated:
        swap = x_layout.contract_first
        with _contexts.gemm(GEMMType.DGRAD):
            dx = product.gemm(
                GEMMType.DGRAD,
                rowwise,
                kernel_again or kernel,
                product.x_dtype,
                swap,
                group_sizes=group_sizes,
            )
        quantizer = product.quantizers.input_grad
        x_cols = len(x_layout.free if swap else x_layout.contract)
        dx, input_grad = product.requantize(quantizer, dx, input_grad_scale, x_cols)
        dx = x_layout.restored(dx)
    if "kernel" in differentiated:
        with _contexts.gemm(GEMMType.WGRAD):
            dkernel = product.gemm(
                GEMMType.WGRAD,
                x_again or x,
                columnwise,
                product.wgrad_dtype,
                swap=not kernel_layout.contract_first,
                group_sizes=group_sizes,
            )
        dkernel = kernel_layout.restored(dkernel)
    if sums is not None:
        dbias = jnp.sum(sums, axis=tuple(range(sums.ndim - cols)))

    # 3. Give what was recorded, in the order of DotGeneralState.
    grad = rowwise if product.records_grad else None
    again = x_again, kernel_again, grad_again
    quantized = [x, kernel, grad, output, input_grad, *again]
    ct = recipes.cotangent(
        product.quantizers, quantized, reading, product.reduce, amaxes
    )
    return dx, dkernel, dbias, ct


def _read_again(q: QTensor, scale, layout: Layout) -> QTensor:
    """Return a residual with the contracting dimensions of the forward first, and with
    the scale that it was quantized with, where the forward dropped it.
    """
    if q.scale_inv is None and scale is not None:
        q = dataclasses.replace(q, scale_inv=scale.scale_inv)
    if _is_turned_late(q) and not layout.contract_first:
        return q.transposed(len(layout.batch))
    return q


def _grad_operand(product, grad, scales, options, differentiated):
    """Quantize the gradient of y, an array or an ActivationGradient, for the products
    that read it.

    Returns:
        `(rowwise, columnwise, again, sums)`: the operand of dgrad; that of wgrad; once
        more that of wgrad, where it has codes of its own; and the sums of rows, which
        make the gradient of the bias. None for what no product reads.
    """
    needs_dx, needs_dkernel = "x" in differentiated, "kernel" in differentiated
    options = options._replace(column_sums="bias" in differentiated)
    quantizer, second = product.quantizers.of_operand(2)
    if second == SharedCodes():
        options = options._replace(columnwise=needs_dkernel)
        q, sums = quantize_operand(quantizer, grad, scales[0], options)
        return *both_layouts(q, product.batch, False, needs_dkernel), None, sums
    if isinstance(grad, FusedInput):
        grad = grad.value
    q = again = sums = None
    if needs_dkernel:
        again, sums = second.quantize_operand(grad, scales[1], options)
        again = both_layouts(again, product.batch, False, True)[1]
        # One pass over grad gives the sums.
        options = options._replace(column_sums=False)
    if needs_dx or not needs_dkernel:
        options = options._replace(columnwise=False)
        q, more_sums = quantizer.quantize_operand(grad, scales[0], options)
        q = dataclasses.replace(q, data_t=None)
        sums = more_sums if sums is None else sums
    return q, again, again, sums


def _is_turned_late(q: QTensor) -> bool:
    """Tell whether codes are kept as the first product reads them: on TPUs a transpose
    is part of the product.

    A loop would store transposed codes, which takes a copy of the operand in each step.
    """
    return is_for_tpu() and q.data is not None and q.has_one_scale


def _in_order(
    name: str, q: QTensor, layout: Layout, options: OperandOptions
) -> QTensor:
    """Return a QTensor that was made outside of the product, in the order of the
    product's dimensions.
    """
    data, cols = layout.ordered(q.data), options.cols
    is_moved = data is not q.data
    if q.has_one_scale:
        data_t = q.data_t if options.columnwise and not is_moved else None
        return QTensor(data, q.scale_inv, data_t, recorded=q.recorded, cols=cols)
    batch = len(layout.batch)
    is_of_rows = q.block is not None and q.block[0] == 1
    if batch and is_of_rows and q.scale_inv.ndim == 2:
        # Scales that were made without the product count batch dimensions as rows.
        leading = data.shape[:batch]
        q = q.map_scales(lambda x: x.reshape(*leading, -1, x.shape[-1]))
    if (
        is_moved
        or cols != q.cols
        or (q.scale_inv is not None and q.scale_inv.ndim != batch + 2)
        or (q.data_t is None and options.contract_first and not q.has_one_code)
    ):
        raise ValueError(
            f"{name}: a QTensor with a scale for each block of {q.block} fits "
            f"products that contract its rows or its last {q.cols} dimensions; "
            "quantize it inside of the product"
        )
    return q


def _with_columnwise(q: QTensor, product: Product, options: OperandOptions) -> QTensor:
    """Give codes of x, whose blocks lie along the columns that fprop contracts, a
    layout with blocks along the rows.

    wgrad contracts the rows: codes are dequantized and quantized once more. Where the
    product's quantizer makes other scales than q has, wgrad dequantizes q.
    """
    # float16 may be too narrow for rounded codes
    x = q.dequantize(promoted(product.x_dtype, jnp.bfloat16))
    again, _ = product.quantizers.input.quantize_operand(x, None, options)
    if again.scale_inv_t is None or again.block != q.block:
        return q
    return dataclasses.replace(
        q,
        data_t=again.data_t,
        scale_inv_t=again.scale_inv_t,
        power_2_scale=q.power_2_scale and again.power_2_scale,
    )
