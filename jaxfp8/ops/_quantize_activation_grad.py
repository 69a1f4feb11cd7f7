"""quantize_activation_grad: compute and quantize the gradient of an activation without the gradient in memory."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _quantize_activation, _shapes
from ._primitive import dims
from ._produced import produced, producer_op
from ._quantize_activation import is_gated

_OP = "quantize_activation_grad"


def activation_grad(x: ArrayLike, grad: ArrayLike, activation: str) -> jax.Array:
    """Compute the gradient of `activate` with respect to x, in f32 and not rounded to the dtype of x.

    With the gradient `g` of `activate(x, activation)`, `f` its function and `f'` the derivative of `f`:

        "silu", "gelu", "relu"       g * f'(x)
        "silu_gated", "gelu_gated"   g * x[..., 1, :] * f'(x[..., 0, :]) and g * f(x[..., 0, :]), stacked as x is

    Args:
        x, activation: the arguments of `activate`.
        grad: bfloat16, float16 or float32, of the shape of `activate(x, activation)`.

    Returns:
        f32, of the shape of x.
    """
    _, vjp = jax.vjp(functools.partial(_quantize_activation._activate, activation=activation), x.astype(jnp.float32))
    return vjp(grad.astype(jnp.float32))[0]


def quantize_activation_grad(
    x: ArrayLike,
    grad: ArrayLike,
    scale: ArrayLike,
    dtype: DTypeLike,
    *,
    activation: str,
    transpose: bool = True,
    amax: ArrayLike | None = None,
    with_amax: bool = True,
    rows: int = 1,
    column_sums: bool = False,
) -> tuple[jax.Array | None, ...]:
    """Quantize the gradient of `activate` with respect to x, kept in f32, with one read of `x` and `grad`.

    Equivalent to, without a rounding in between:

        dx = jax.vjp(lambda x: activate(x, activation), x.astype(f32))[1](grad.astype(f32))[0]
        data, data_t, amax = quantize_transpose(dx, scale, dtype, rows=rows, cols=2 if gated else 1)

    up to the rounding errors of dx, as for `quantize_activation`. A dx that is not finite gives a NaN code and an
    infinite amax.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`; for a gated activation `[..., m, 2, n]`. The x of `activate`.
        grad: the gradient of `activate(x, activation)`, of x's dtype, `[..., m, n]`.
        scale: f32[] or f32[1], the factor of dx.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: "gelu", "silu", "relu", "silu_gated" or "gelu_gated"; see `activate`.
        transpose: whether to return data_t.
        amax, with_amax: see `quantize`.
        rows: the number of dimensions that m stands for.
        column_sums: whether to return the sums of dx over its rows too: the gradient of a bias that was added to x.
            The sums need `transpose`.

    Returns:
        `(data, data_t, amax)`: data of the shape of x and data_t `[..., n, m]`, gated `[..., 2, n, m]` (or None), of
        `dtype`, the amax of dx. With `column_sums` also the sums, f32 `[..., n]`, gated `[..., 2, n]`.

    Raises:
        TypeError: x, grad, scale, dtype, amax or column_sums has another dtype; or the op is differentiated.
        ValueError: an argument has another shape, `activation` is not one of the names, or column_sums comes without
            transpose.
    """
    x = _checks.high_precision(_OP, "x", x)
    _quantize_activation.check(_OP, x, activation, rows)
    grad = _checks.high_precision(_OP, "grad", grad)
    if grad.dtype != x.dtype:
        raise TypeError(f"{_OP}: grad: expected the dtype of x, {x.dtype}, got {grad.dtype}; cast it")
    _checks.shape(_OP, "grad", grad, x.shape[:-2] + x.shape[-1:] if is_gated(activation) else x.shape)
    column_sums = _checks.flag(_OP, "column_sums", column_sums)
    if column_sums and not transpose:
        raise ValueError(f"{_OP}: column_sums: expected transpose=True beside column_sums=True, got {transpose!r}")
    options = {"dtype": dtype, "transpose": transpose, "with_amax": with_amax, "column_sums": column_sums}
    options |= {"activation": activation, "rows": rows}
    return produced(_quantize_activation_grad, _OP, x, scale, (grad,), amax, **options)


def _canonical(x, grad, *, vmap_dims, rows, activation):
    (x,), attributes = _quantize_activation._canonical(x, vmap_dims=vmap_dims, rows=rows, activation=activation)
    return (x, _shapes.merge(grad, grad.ndim - rows - 1, rows)), attributes


_quantize_activation_grad = producer_op(
    _OP,
    produce=lambda x, grad, vmap_dims, activation: activation_grad(x, grad, activation),
    names=lambda batch, row, col, activation: [batch + row + col, batch + row + col[-1:]],
    columns=lambda activation: dims("whole_pair", is_gated(activation)) + dims("col", 1),
    canonical=_canonical,
)
