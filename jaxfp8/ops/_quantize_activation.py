"""quantize_activation and quantize_activation_grad: an activation, or its gradient,
quantized in one pass.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..numerics import _tpu
from . import _checks, _shapes
from ._primitive import dims
from ._quantize_transpose import Producer

_GELU = 2 * math.sqrt(2 / math.pi)


def _gelu(x):
    # 0.5 * (1 + tanh(z / 2)) is the logistic function of z. The sum would cancel where
    # z is far below zero.
    return x * lax.logistic(
        x * (_full(x, _GELU) + _full(x, _GELU * 0.044715) * (x * x))
    )


def _silu(x):
    return x * lax.logistic(x)


def _relu(x):
    return jnp.where(x <= 0, _full(x, 0), x)  # keeps NaN; the derivative at 0 is 0


def _relu_squared(x):
    x = _relu(x)
    return x * x


def _full(x, value):
    return lax.full_like(x, value)


# A gated activation applies its function to the gate, which multiplies the other half.
_FUNCTIONS = {
    "gelu": _gelu,
    "silu": _silu,
    "relu": _relu,
    "silu_gated": _silu,
    "gelu_gated": _gelu,
    "relu_squared": _relu_squared,
}
# The names that `quantize_activation` and `activate` take.
ACTIVATIONS = tuple(_FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """SwiGLU whose gate and up are clamped before they are multiplied; taken wherever
    the name of an activation is.

        jaxfp8.ops.ClampedSwiGLU(limit=7.0, alpha=1.702, offset=1.0)  # gpt-oss
        jaxfp8.ops.ClampedSwiGLU(limit=10.0)                          # DeepSeek-V4

    With `s(z) = 1 / (1 + exp(-z))` and x `[..., 2, n]`, gate first:

        gate = min(x[..., 0, :], limit)
        up = min(max(x[..., 1, :], -limit), limit)
        gate * s(alpha * gate) * (up + offset)

    NaN stays NaN. The derivative of a clamp is 1 up to the limit, and at it, and 0
    beyond: that of torch.clamp, where jnp.clip and jnp.minimum differ at the limit.

    Source: TransformerEngine's ClampedSwiGLU, with its `glu_linear_offset` as `offset`.
    gpt-oss interleaves gate and up; put them in two halves.

    Attributes:
        limit: a positive number; computed with in float32, as the others.
        alpha: a positive number, the factor in the sigmoid.
        offset: a number that is added to up, after the clamp.

    Raises:
        ValueError: a number is not finite in float32, or `limit` or `alpha` not
            positive.
    """

    limit: float
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            least, needed = 0, "positive"
            if name == "offset":
                least, needed = -np.inf, "finite"
            if not least < np.float32(value) < np.inf:
                raise ValueError(
                    f"ClampedSwiGLU: {name}: expected a {needed} number of float32, "
                    f"got {value!r}"
                )


def is_gated(activation: str | ClampedSwiGLU) -> bool:
    """Return whether the x of an activation holds a gate and the values that the gate
    multiplies, `[..., 2, n]`.
    """
    return isinstance(activation, ClampedSwiGLU) or activation.endswith("_gated")


def activate(x: ArrayLike, activation: str | ClampedSwiGLU) -> jax.Array:
    """Apply an activation function of `quantize_activation`, in f32 and rounded once to
    x's dtype; differentiable.

    With `s(z) = 1 / (1 + exp(-z))` and
    `z(x) = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)`:

        "silu"          x * s(x)
        "gelu"          x * s(z(x)), which is jax.nn.gelu(x, approximate=True) without
                        its cancellation for x < 0
        "relu"          max(x, 0)
        "relu_squared"  max(x, 0)**2
        "silu_gated"    silu(x[..., 0, :]) * x[..., 1, :]    (SwiGLU)
        "gelu_gated"    gelu(x[..., 0, :]) * x[..., 1, :]    (GEGLU)

    `ClampedSwiGLU` has the formula of its own. Sources: GELU is arXiv:1606.08415, the
    squared ReLU arXiv:2109.08668, SwiGLU and GEGLU are arXiv:2002.05202.

    NaN stays NaN and +inf gives inf; silu(-inf) and gelu(-inf) are products of infinity
    and 0 in f32, which give NaN.

    Args:
        x: bfloat16, float16 or float32 `[...]`; for a gated activation `[..., 2, n]`.
        activation: one of the names above, or a `ClampedSwiGLU`.

    Returns:
        An array of x's dtype, `[...]`; for a gated activation `[..., n]`.

    Raises:
        TypeError: x has another dtype.
        ValueError: `activation` is not one of the names, or x is not `[..., 2, n]` for
            a gated activation.
    """
    x = _checks.high_precision("activate", "x", x)
    check("activate", x, activation)
    return _activate(x, activation).astype(x.dtype)


def _activate(x, activation):
    if not _tpu.is_target():
        # a TPU widens the halves: XLA finds them in a product where nothing widens the
        # pair
        x = x.astype(jnp.float32)
    if is_gated(activation):
        return _gate(activation, *_halves(x))
    return _FUNCTIONS[activation](x.astype(jnp.float32))


def _halves(x):
    return [half.astype(jnp.float32) for half in _tpu.halves(x)]


def _gate(activation, gate, up):
    if not isinstance(activation, ClampedSwiGLU):
        return _FUNCTIONS[activation](gate) * up
    limit = _full(gate, activation.limit)
    alpha, offset = _full(gate, activation.alpha), _full(gate, activation.offset)
    gate = _at_most(gate, limit)
    up = jnp.where(up < -limit, -limit, _at_most(up, limit))
    return gate * lax.logistic(alpha * gate) * (up + offset)


def _at_most(x, limit):
    return jnp.where(x > limit, limit, x)  # keeps NaN; the derivative at limit is 1


def quantize_activation(x, scale, dtype, *, activation, amax=None, **options):
    """Quantize `activate(x, activation)`, kept in f32, with one read of `x`.

    Equivalent to, without a rounding in between:

        h = activate(x.astype(f32), activation)
        data, data_t, amax = quantize_transpose(h, scale, dtype, rows=rows)

    up to the rounding errors of h: about 6 units in the last place of h, and about |z|
    units in the tails where h goes to zero. Where such an error decides between two
    codes, implementations may differ by one code. An h that is not finite gives a NaN
    code and an infinite amax.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`; for a gated activation
            `[..., m, 2, n]`.
        scale: f32[] or f32[1], the factor of h.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: see `activate`.
        transpose: whether to return data_t.
        amax, with_amax: see `quantize`.
        rows: the number of dimensions that m stands for.

    Returns:
        `(data, data_t, amax)`: data `[..., m, n]` and data_t `[..., n, m]` (or None) of
        `dtype`, the amax of h.

    Raises:
        TypeError: scale, dtype or amax has another dtype; or the op is differentiated.
        ValueError: scale or amax has another shape.
    """
    return _QuantizeActivation.quantize(
        x, scale, (), amax, dtype, activation=activation, **options
    )


def check(op, x, activation, name="x"):
    """Raise unless `activation` is known and x, the argument `name`, has a shape for
    that activation.
    """
    check_activation(op, activation)
    if is_gated(activation) and _checks.rank(op, name, x, 2).shape[-2] != 2:
        raise ValueError(
            f"{op}: {name}: expected [..., 2, n] for {activation!r}, got "
            f"{x.dtype}{list(x.shape)}"
        )


def check_activation(op, activation):
    """Raise a ValueError unless `activation` is one that `activate` takes."""
    if not isinstance(activation, ClampedSwiGLU) and activation not in ACTIVATIONS:
        names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise ValueError(
            f"{op}: activation: expected one of {names}, or a "
            f"jaxfp8.ops.ClampedSwiGLU, got {activation!r}"
        )


class _QuantizeActivation(Producer):
    name = "quantize_activation"
    activation: str | ClampedSwiGLU | None = None

    def pair(self):
        """Return the name of the dimension of gate and up, where there is a gate."""
        return dims("whole_pair", is_gated(self.activation))

    def operand_parts(self, row, col):
        # The pair is a part of its own, of size 1 without a gate, so that one kernel
        # serves both.
        return [(row, self.pair(), col)]

    def produce(self, x):
        return _activate(x, self.activation)

    def attributes(self):
        if not isinstance(self.activation, ClampedSwiGLU):
            return {"activation": self.activation}
        numbers = jax.tree.map(np.float32, dataclasses.asdict(self.activation))
        return {"activation": "clamped_swiglu"} | numbers


def activation_grad(x, grad, activation):
    """Compute the gradient of `activate` with respect to x, in f32 and not rounded to
    the dtype of x.

    With the gradient `g` of `activate(x, activation)`, `f` its function and `f'` the
    derivative of `f`:

        without a gate               g * f'(x)
        "silu_gated", "gelu_gated"   g * x[..., 1, :] * f'(x[..., 0, :]) and
                                     g * f(x[..., 0, :]), stacked as x is
        ClampedSwiGLU                the same of the clamped x and up + offset, times
                                     the derivatives of the clamps

    Args:
        x, activation: the arguments of `activate`.
        grad: bfloat16, float16 or float32, of the shape of `activate(x, activation)`.

    Returns:
        f32, of the shape of x.
    """
    activated = functools.partial(_activate, activation=activation)
    _, vjp = jax.vjp(activated, x.astype(jnp.float32))
    return vjp(grad.astype(jnp.float32))[0]


def quantize_activation_grad(
    x, grad, scale, dtype, *, activation, amax=None, **options
):
    """Quantize the gradient of `activate` with respect to x, kept in f32, with one read
    of `x` and `grad`.

    Equivalent to, without a rounding in between:

        _, vjp = jax.vjp(lambda x: activate(x, activation), x.astype(f32))
        (dx,) = vjp(grad.astype(f32))
        data, data_t, amax = quantize_transpose(
            dx, scale, dtype, rows=rows, cols=2 if gated else 1
        )

    up to the rounding errors of dx, as for `quantize_activation`. A dx that is not
    finite gives a NaN code and an infinite amax.

    Args:
        x: bfloat16, float16 or float32 `[..., m, n]`; for a gated activation
            `[..., m, 2, n]`. The x of `activate`.
        grad: the gradient of `activate(x, activation)`, of x's dtype, `[..., m, n]`.
        scale: f32[] or f32[1], the factor of dx.
        dtype: float8_e4m3fn or float8_e5m2.
        activation: see `activate`.
        transpose: whether to return data_t.
        amax, with_amax: see `quantize`.
        rows: the number of dimensions that m stands for.
        column_sums: whether to return the sums of dx over its rows too: the gradient of
            a bias that was added to x. The sums need `transpose`.

    Returns:
        `(data, data_t, amax)`: data of the shape of x and data_t `[..., n, m]`, gated
        `[..., 2, n, m]` (or None), of `dtype`, the amax of dx. With `column_sums` also
        the sums, f32 `[..., n]`, gated `[..., 2, n]`.

    Raises:
        TypeError: scale, dtype or amax has another dtype; or the op is differentiated.
        ValueError: scale or amax has another shape.
    """
    options["cols"] = 1 + is_gated(activation)
    return _QuantizeActivationGrad.quantize(
        x, scale, (grad,), amax, dtype, activation=activation, **options
    )


class _QuantizeActivationGrad(_QuantizeActivation):
    name = "quantize_activation_grad"

    def columns(self):
        return self.pair() + dims("col", 1)

    def operand_parts(self, row, col):
        return [(row, col[:-1], col[-1:]), (row, col[-1:])]

    def produce(self, x, grad):
        return activation_grad(x, grad, self.activation)

    def tpu(self, x, scale, grad, *amax_so_far):
        """Compute the gradients of gate and up apart, with one amax."""
        if not is_gated(self.activation):
            return self.reference(x, scale, grad, *amax_so_far)
        _, vjp = jax.vjp(functools.partial(_gate, self.activation), *_halves(x))
        gradients = vjp(grad.astype(jnp.float32))
        of_half = dataclasses.replace(self, with_amax=False, cols=1)
        results = [of_half.quantized(half, scale) for half in gradients]
        (data, *rest), amax = zip(*results, strict=True), []
        if self.with_amax:
            largest = _shapes.abs_max(_tpu.larger(*gradients), self.vmap_dims)
            amax = [_shapes.raise_amax(largest, *amax_so_far)]
        outputs = [_tpu.joined(data)]
        if self.transpose:
            outputs.append(jnp.stack(rest.pop(0), axis=-2 - self.rows))
        return [*outputs, *amax, *map(_tpu.joined, rest)]
