"""The oracle for a layer (see `__init__.py`): one step of its three products and of its
state.
"""

import dataclasses
import functools

import numpy as np

from oracle.codec import E4M3, E5M2, F32, Format
from oracle.products import Product, group_ranges, ragged_matmul, scaled_matmul
from oracle.scaling import DEFAULTS, Options, State, step


@dataclasses.dataclass(frozen=True)
class LayerState:
    """The three quantizers of a layer."""

    input: State
    kernel: State
    output_grad: State

    @staticmethod
    def init(length: int) -> "LayerState":
        return LayerState(*(State.init(length) for _ in range(3)))


@dataclasses.dataclass(frozen=True)
class DenseStep:
    """All a Dense layer's step gives: codes, scales, the three products, the next
    state.
    """

    codes: dict[str, np.ndarray]
    scales: dict[str, np.float32]
    y: Product
    dgrad: Product
    wgrad: Product
    state: LayerState

    def check(self, what: str = "step", **products) -> None:
        """Raises AssertionError unless the products that are given, out of y, dgrad and
        wgrad, are within bounds.
        """
        for name, got in products.items():
            getattr(self, name).check(got, f"{what}: {name}")


def dense_step(
    x,
    kernel,
    grad,
    state: LayerState,
    options: Options = DEFAULTS,
    *,
    forward: Format = E4M3,
    backward: Format = E5M2,
    out_dtype=F32,
    dgrad_dtype=F32,
    wgrad_dtype=F32,
    bias=None,
    multiply=scaled_matmul,
) -> DenseStep:
    """One forward and backward of y = x @ kernel: fprop = x @ kernel, dgrad = grad @
    kernel.T, wgrad = x.T @ grad.

    x `[m, k]`, kernel `[k, n]`, grad `[m, n]` in the dtypes in which they are
    quantized. bias `[n]` is added to y, rounded to out_dtype. multiply: the product of
    codes and their scales.
    """
    x_codes, x_scale, x_state = step(x, state.input, forward, options)
    k_codes, k_scale, k_state = step(kernel, state.kernel, forward, options)
    g_codes, g_scale, g_state = step(grad, state.output_grad, backward, options)
    x_inv, k_inv, g_inv = x_state.scale, k_state.scale, g_state.scale
    bias = None if bias is None else bias.astype(out_dtype)
    return DenseStep(
        codes={"input": x_codes, "kernel": k_codes, "output_grad": g_codes},
        scales={"input": x_scale, "kernel": k_scale, "output_grad": g_scale},
        y=multiply(
            x_codes,
            k_codes.swapaxes(-2, -1),
            x_inv,
            k_inv,
            bias=bias,
            out_dtype=out_dtype,
        ),
        dgrad=multiply(g_codes, k_codes, g_inv, k_inv, out_dtype=dgrad_dtype),
        wgrad=multiply(x_codes.T, g_codes.T, x_inv, g_inv, out_dtype=wgrad_dtype),
        state=LayerState(x_state, k_state, g_state),
    )


def ragged_step(
    lhs,
    rhs,
    group_sizes,
    grad,
    state: LayerState,
    options: Options = DEFAULTS,
    **dtypes,
) -> DenseStep:
    """One forward and backward of rows of lhs `[m, k]` by the matrix of their group in
    rhs `[g, k, n]`.

    dgrad = grad @ rhs[e].T for the rows of group e, wgrad[e] = lhs.T @ grad over them.
    Rows of no group are as if lhs and grad were zero there. dtypes: as of `dense_step`.
    """
    rows = group_ranges(group_sizes)[-1][1]
    lhs, grad = (
        np.where(np.arange(len(x))[:, None] < rows, x, np.zeros((), x.dtype))
        for x in (lhs, grad)
    )
    multiply = functools.partial(ragged_matmul, group_sizes=group_sizes)
    return dense_step(lhs, rhs, grad, state, options, multiply=multiply, **dtypes)
