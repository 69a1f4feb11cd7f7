"""dot_general in FP8: three products, straight-through gradients, and the next state as the cotangent of the state.

fprop   y       = x      @ kernel
dgrad   dx      = grad   @ kernel.T
wgrad   dkernel = x.T    @ grad
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import ops
from ._layout import layouts
from .ops import _checks
from .recipes import DotGeneralState


def dot_general(
    x, kernel, dimension_numbers, *, recipe, state=None, precision=None, preferred_element_type=None, out_sharding=None
):
    """`jax.lax.dot_general` with both operands, and the gradient of the output, in FP8.

    Equivalent to `lax.dot_general(q(x), q(kernel), dimension_numbers)`, where `q` quantizes and dequantizes with the
    scale that the recipe takes from the state; products are exact and accumulate in f32. Gradients pass straight
    through `q` (saturated elements still get theirs) and are products of FP8 operands as well. **The cotangent of
    `state` is the next state**: overwrite with it, never add it.

    Args:
        x: bfloat16, float16 or float32, any shape; the `input`.
        kernel: bfloat16, float16 or float32, any shape. A float32 kernel gets its gradient in float32.
        dimension_numbers: `((x_contract, kernel_contract), (x_batch, kernel_batch))`.
        recipe: for example `DelayedScaling()`.
        state: `init_state(recipe)`, or what the last step returned.
        precision: None or DEFAULT leaves accumulation to the recipe; HIGH or HIGHEST makes all three products precise.
        preferred_element_type: dtype of the result; without it `jnp.result_type(x, kernel)`.
        out_sharding: not supported; must be None.

    Returns:
        The product, batch dimensions first, then those of x, then those of kernel.

    Raises:
        TypeError: an operand's or the result's dtype is not bfloat16, float16 or float32; second derivatives and
            forward mode.
        ValueError: shapes do not fit, the recipe's state is missing, or an option cannot be honoured.
    """
    x = _checks.high_precision("dot_general", "x", x)
    kernel = _checks.high_precision("dot_general", "kernel", kernel)
    if out_sharding is not None:
        raise ValueError("dot_general: out_sharding: expected None; constrain the result's sharding instead")
    if state is None:
        raise ValueError(
            f"dot_general: state: {type(recipe).__name__} keeps state; pass jaxfp8.init_state(recipe), then what the "
            "gradient with respect to it returned"
        )
    if preferred_element_type is None:
        with jax.numpy_dtype_promotion("standard"):
            preferred_element_type = jnp.result_type(x, kernel)
    out_dtype = _checks.dtype("dot_general", "preferred_element_type", preferred_element_type, _checks.HIGH_PRECISION)
    x_layout, kernel_layout = layouts(x.shape, kernel.shape, dimension_numbers)
    out_shape = (
        *x_layout.sizes(x_layout.batch),
        *x_layout.sizes(x_layout.free),
        *kernel_layout.sizes(kernel_layout.free),
    )
    if 0 in x.shape or 0 in kernel.shape:  # nothing to see: gradients are zero, the state is not touched
        return jnp.zeros(out_shape, out_dtype)

    plan = _Plan(
        quantizers=recipe.quantizers(),
        x_contract_first=x_layout.contract_first,
        kernel_contract_first=kernel_layout.contract_first,
        x_dtype=x.dtype,
        kernel_dtype=kernel.dtype,
        out_dtype=out_dtype,
        precise=_precise(precision, recipe),
    )
    state = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state)
    y = _product(plan, x_layout.to_matrices(x), kernel_layout.to_matrices(kernel), state)
    return y.reshape(out_shape)


def _precise(precision, recipe) -> frozenset:
    """The products that accumulate precisely."""
    wanted = precision if isinstance(precision, (tuple, list)) else (precision,)
    names = {"DEFAULT" if p is None else p.name if isinstance(p, lax.Precision) else str(p).upper() for p in wanted}
    if names <= {"DEFAULT", "FASTEST"}:
        return frozenset(recipe.precise)
    if names <= {"HIGH", "HIGHEST", "FLOAT32"}:
        return frozenset(("fprop", "dgrad", "wgrad"))
    raise ValueError(
        f"dot_general: precision: expected None, DEFAULT, HIGH or HIGHEST for both operands, got {precision!r}"
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static about one product of `[g, rows, cols]` operands."""

    quantizers: tuple  # of x, kernel and grad
    x_contract_first: bool
    kernel_contract_first: bool
    x_dtype: np.dtype
    kernel_dtype: np.dtype
    out_dtype: np.dtype
    precise: frozenset

    def gemm(self, name, a, b, out_dtype, swap=False):
        """`a @ b.T` of `(codes, scale_inv)` pairs, or its transpose `b @ a.T`."""
        (a, a_scale_inv), (b, b_scale_inv) = (b, a) if swap else (a, b)

        def matmul(a, b):
            return ops.scaled_matmul(a, b, a_scale_inv, b_scale_inv, out_dtype=out_dtype, precise=name in self.precise)

        return matmul(a[0], b[0])[None] if a.shape[0] == 1 else jax.vmap(matmul)(a, b)


def _views(q, contract_first):
    """`(codes, scale_inv)` with the contracting dimension last, for fprop, and with it first, for the backward."""
    last, first = (q.data_t, q.data) if contract_first else (q.data, q.data_t)
    return (last, q.scale_inv), (first, q.scale_inv)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(plan, x, kernel, state):
    """fprop alone: an operand is transposed only where fprop needs that."""
    q_x, _ = plan.quantizers[0].quantize(x, state.input, transpose=plan.x_contract_first)
    q_kernel, _ = plan.quantizers[1].quantize(kernel, state.kernel, transpose=plan.kernel_contract_first)
    x_last, _ = _views(q_x, plan.x_contract_first)
    kernel_last, _ = _views(q_kernel, plan.kernel_contract_first)
    return plan.gemm("fprop", x_last, kernel_last, plan.out_dtype)


def _product_fwd(plan, x, kernel, state):
    q_x, next_input = plan.quantizers[0].quantize(x, state.input)
    q_kernel, next_kernel = plan.quantizers[1].quantize(kernel, state.kernel)
    x_last, x_first = _views(q_x, plan.x_contract_first)
    kernel_last, kernel_first = _views(q_kernel, plan.kernel_contract_first)
    y = plan.gemm("fprop", x_last, kernel_last, plan.out_dtype)
    # Of each operand one FP8 layout is kept for the backward.
    return y, (x_first, kernel_first, next_input, next_kernel, state.output_grad)


def _product_bwd(plan, residuals, grad):
    x_first, kernel_first, next_input, next_kernel, output_grad = residuals
    q_grad, next_output_grad = plan.quantizers[2].quantize(grad, output_grad)
    grad_rows, grad_cols = (q_grad.data, q_grad.scale_inv), (q_grad.data_t, q_grad.scale_inv)
    dx = plan.gemm("dgrad", grad_rows, kernel_first, plan.x_dtype, swap=plan.x_contract_first)
    dkernel = plan.gemm("wgrad", x_first, grad_cols, plan.kernel_dtype, swap=not plan.kernel_contract_first)
    return dx, dkernel, DotGeneralState(next_input, next_kernel, next_output_grad)


_product.defvjp(_product_fwd, _product_bwd)
