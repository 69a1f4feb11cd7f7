"""quantize_activation: an activation function and its quantization in one pass, without its result in memory."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _shapes
from ._primitive import dims
from ._produced import produced, producer_op

_GELU = 2 * math.sqrt(2 / math.pi)


def _gelu(x):
    # 0.5 * (1 + tanh(z / 2)) is the logistic function of z. The sum would cancel where z is far below zero.
    return x * lax.logistic(x * (_full(x, _GELU) + _full(x, _GELU * 0.044715) * (x * x)))


def _silu(x):
    return x * lax.logistic(x)


def _relu(x):
    return jnp.where(x <= 0, _full(x, 0), x)  # keeps NaN; the derivative at 0 is 0


def _full(x, value):
    return lax.full_like(x, value)


# A gated activation applies its function to the gate, which multiplies the other half.
_FUNCTIONS = {"gelu": _gelu, "silu": _silu, "relu": _relu, "silu_gated": _silu, "gelu_gated": _gelu}
# The names that `quantize_activation` and `activate` take.
ACTIVATIONS = tuple(_FUNCTIONS)


def is_gated(activation: str) -> bool:
    """Return whether the x of an activation holds a gate and the values that the gate multiplies, `[..., 2, n]`."""
    return activation.endswith("_gated")


def activate(x: ArrayLike, activation: str) -> jax.Array:
    """Apply an activation function of `quantize_activation`, in f32 and rounded once to x's dtype; differentiable.

    With `s(z) = 1 / (1 + exp(-z))` and `z(x) = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)`:

        "silu"        x * s(x)
        "gelu"        x * s(z(x)), which is jax.nn.gelu(x, approximate=True) without its cancellation for x < 0
        "relu"        max(x, 0)
        "silu_gated"  silu(x[..., 0, :]) * x[..., 1, :]    (SwiGLU)
        "gelu_gated"  gelu(x[..., 0, :]) * x[..., 1, :]    (GEGLU)

    Sources: GELU is arXiv:1606.08415, SwiGLU and GEGLU are arXiv:2002.05202.

    NaN stays NaN and +inf gives inf; silu(-inf) and gelu(-inf) are products of infinity and 0 in f32, which give NaN.

    Args:
        x: bfloat16, float16 or float32 `[...]`; for a gated activation `[..., 2, n]`.
        activation: one of the names above.

    Returns:
        An array of x's dtype, `[...]`; for a gated activation `[..., n]`.

    Raises:
        TypeError: x has another dtype.
        ValueError: `activation` is not one of the names, or x is not `[..., 2, n]` for a gated activation.
    """
    x = _checks.high_precision("activate", "x", x)
    check("activate", x, activation, 0)
    return _activate(x, activation).astype(x.dtype)


def _activate(x, activation):
    x = x.astype(jnp.float32)
    function = _FUNCTIONS[activation]
    if not is_gated(activation):
        return function(x)
    gate, up = (lax.index_in_dim(x, i, axis=x.ndim - 2, keepdims=False) for i in range(2))
    return function(gate) * up


def quantize_activation(
    x: ArrayLike,
    scale: ArrayLike,
    dtype: DTypeLike,
    *,
    activation: str,
    transpose: bool = True,
    amax: ArrayLike | None = None,
    with_amax: bool = True,
    rows: int = 1,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Quantize `activate(x, activation)`, kept in f32, with one read of `x`.

    Equivalent to, without a rounding in between:

        h = activate(x.astype(f32), activation)
        data, data_t, amax = quantize_transpose(h, scale, dtype, rows=rows)

    up to the rounding errors of h: about 6 units in the last place of h, and about |z| units in the tails where h goes
    to zero. Where such an error decides between two codes, implementations may differ by one code. An h that is not
    finite gives a NaN code and an infinite amax.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`; for a gated activation `[..., m, 2, n]`.
        scale: f32[] or f32[1], the factor of h.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: "gelu", "silu", "relu", "silu_gated" or "gelu_gated"; see `activate`.
        transpose: whether to return data_t.
        amax, with_amax: see `quantize`.
        rows: the number of dimensions that m stands for.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` (or None) of `dtype`, the amax of h.

    Raises:
        TypeError: x, scale, dtype or amax has another dtype; or the op is differentiated.
        ValueError: an argument has another shape, or `activation` is not one of the names.
    """
    op = "quantize_activation"
    x = _checks.high_precision(op, "x", x)
    check(op, x, activation, rows)
    options = {"dtype": dtype, "transpose": transpose, "with_amax": with_amax, "activation": activation, "rows": rows}
    return produced(_quantize_activation, op, x, scale, (), amax, **options)


def check(op, x, activation, rows, name="x"):
    """Raise unless `activation` is known and x, the argument `name`, has a shape for that activation."""
    if activation not in _FUNCTIONS:
        raise ValueError(f"{op}: activation: expected one of {ACTIVATIONS}, got {activation!r}")
    _checks.rank(op, name, x, rows + (2 if is_gated(activation) else bool(rows)))
    if is_gated(activation) and x.shape[-2] != 2:
        raise ValueError(f"{op}: {name}: expected [..., 2, n] for {activation!r}, got {x.dtype}{list(x.shape)}")


def _canonical(x, *, vmap_dims, rows, activation):
    # The pair is a dimension of its own, of size 1 without a gate, so that one kernel serves both.
    pair = int(is_gated(activation))
    return (_shapes.merge(x, x.ndim - rows - pair - 1, rows, pair),), {"activation": activation}


_quantize_activation = producer_op(
    "quantize_activation",
    produce=lambda x, vmap_dims, activation: _activate(x, activation),
    names=lambda batch, row, col, activation: [batch + row + dims("whole_pair", is_gated(activation)) + col],
    canonical=_canonical,
)
