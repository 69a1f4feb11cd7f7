"""Operands that become FP8 in the pass that computes them: activations and norms, pairs
of kernels, and gradients of activations.

A value that a custom call reads has to be in memory. So `silu(gate) * up` followed by a
product would be written in bfloat16 and read again; a fused input writes and reads its
codes alone. The gradient is that of the plain computation; its backward may keep the
input of the activation or norm in FP8, one byte an element in place of two or four.

In the same way the backward of `activation(y)` would write the gradient of y in
bfloat16, and the product that made y would read it again. So that product takes y and
the gradient of the activation's values in its place.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from .. import ops
from .._jax import _mesh
from .._jax._primitives import without_numpy
from ..numerics import E4M3, FP8_DTYPES
from ..ops import _checks, _quantize_activation, _quantize_norm
from ..ops._support import using
from ..recipes import (
    Float8CurrentScalingQuantizer,
    OperandOptions,
    QTensor,
    Quantized,
    as_bytes,
    as_codes,
)

# Name for rematerialization policies (checkpoint_policies.py).
RESIDUAL_NAME = "jaxfp8_residual"
# The name that policies of MaxText have for the codes of TransformerEngine.
_TE_NAME = "te_quantization"


def as_residual(value):
    """Name what the backward keeps, so that a policy with either name saves it."""
    return checkpoint_name(checkpoint_name(value, _TE_NAME), RESIDUAL_NAME)


def as_read_residual(q: QTensor) -> QTensor:
    """Name codes that the forward reads as well, as bytes.

    `jax.checkpoint` reduces the precision of floats that it saves and that the forward
    reads, and XLA's reduction to four and three bits makes NaN of the codes of E4M3
    above 240.
    """

    def named(x):
        if x.dtype not in FP8_DTYPES:
            return as_residual(x)
        return as_residual(x.view(jnp.uint8)).view(x.dtype)

    return jax.tree.map(named, q)


class FusedInput:
    """The base of values that are not computed yet: a pytree whose first leaf is `x`,
    the array to compute them of.

    A class of them has `compute()`, which computes the values by differentiable
    operations of JAX, and `quantize_op(options)`, which returns the op that quantizes
    them: `(scale, dtype, amax=amax so far or None, with_amax=) -> (data, data_t, amax,
    *column sums)`.
    """

    x: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values."""
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the values, where they are not codes."""
        return self.x.dtype

    @property
    def value(self) -> jax.Array:
        """Return the values, in the dtype of x."""
        return self.values()

    def fixed(self) -> Self:
        """Return the input without gradient, for its codes."""
        return jax.tree.map(_mesh.without_reduced, jax.lax.stop_gradient(self))

    def values(self, fp8_residual: bool = False) -> jax.Array:
        """Return the values; `fp8_residual` says whether their backward reads codes of
        x.
        """
        return _values(fp8_residual, self)

    def amax(self) -> jax.Array:
        """Compute the amax of the values, f32[]."""
        return ops.amax(self.value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Activated(FusedInput):
    """`activation(x)`, not computed yet: the result of `jaxfp8.activated`, or of a
    product with an `activation`.

    Attributes:
        x: the input of the activation.
        activation: one that `jaxfp8.activated` takes.
        source: the values as a result of the product that made x, which takes their
            gradient to x; else None.
    """

    x: jax.Array
    activation: str | ops.ClampedSwiGLU = dataclasses.field(metadata={"static": True})
    source: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values."""
        shape = self.x.shape
        return shape[:-2] + shape[-1:] if ops.is_gated(self.activation) else shape

    def compute(self) -> jax.Array:
        """Compute the values; see `FusedInput`."""
        return ops.activate(self.x, self.activation)

    def values(self, fp8_residual: bool = False) -> jax.Array:
        """Return the values; see `FusedInput.values`."""
        return super().values(fp8_residual) if self.source is None else self.source

    def fixed(self) -> "Activated":
        """Return the input without gradient, for its codes."""
        return Activated(jax.lax.stop_gradient(self.x), self.activation)

    def quantize_op(self, options: OperandOptions) -> Callable[..., tuple]:
        """Return the op that quantizes the values; see `FusedInput`."""
        return functools.partial(
            ops.quantize_activation,
            self.x,
            activation=self.activation,
            rows=options.rows,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalized(FusedInput):
    """A norm of x over its last dimension, not computed yet: the result of
    `jaxfp8.normalized`.
    """

    x: jax.Array
    scale: jax.Array
    bias: jax.Array | None
    kind: str = dataclasses.field(metadata={"static": True})
    epsilon: float = dataclasses.field(metadata={"static": True})

    def compute(self) -> jax.Array:
        """Compute the values; see `FusedInput`."""
        return ops.normalize(self.x, self.scale, self.bias, self.kind, self.epsilon)

    def quantize_op(self, options: OperandOptions) -> Callable[..., tuple]:
        """Return the op that quantizes the values; see `FusedInput`."""
        return functools.partial(
            ops.quantize_norm,
            self.x,
            self.scale,
            self.bias,
            kind=self.kind,
            epsilon=self.epsilon,
            rows=options.rows,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair(FusedInput):
    """Two kernels `[k, n]` as one kernel `[k, 2, n]`, not joined yet.

    Attributes:
        x, second: the kernels.
    """

    x: jax.Array
    second: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values."""
        k, n = self.x.shape
        return k, 2, n

    def compute(self) -> jax.Array:
        """Compute the values; see `FusedInput`."""
        return jnp.stack([self.x, self.second], -2)

    def values(self, fp8_residual: bool = False) -> jax.Array:
        """Return the values; see `FusedInput.values`. Their backward keeps nothing."""
        return self.compute()

    def quantize_op(self, options: OperandOptions) -> Callable[..., tuple]:
        """Return the op that quantizes the values; see `FusedInput`."""
        return functools.partial(ops.quantize_pair, self.x, self.second)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGradient(FusedInput):
    """The gradient of the x of an activation, not computed yet: the gradient of
    `activation(x)` times the derivative of the activation.

    Attributes:
        x: the result of a product, `[..., n]`; gated `[..., 2, n]`.
        grad: the gradient of `ops.activate(x, activation)`, in the dtype of x.
        activation: one that `ops.activate` takes.
    """

    x: jax.Array
    grad: jax.Array
    activation: str | ops.ClampedSwiGLU = dataclasses.field(metadata={"static": True})

    def compute(self) -> jax.Array:
        """Compute the gradient of x, f32: as it is rounded to FP8."""
        return ops.activation_grad(self.x, self.grad, self.activation)

    @property
    def value(self) -> jax.Array:
        """Return the gradient of x, in the dtype of x."""
        return self.compute().astype(self.x.dtype)

    def quantize_op(self, options: OperandOptions) -> Callable[..., tuple]:
        """Return the op that quantizes the values; see `FusedInput`."""
        return functools.partial(
            ops.quantize_activation_grad,
            self.x,
            self.grad,
            activation=self.activation,
            # the pass that writes columns has their sums
            transpose=options.columnwise or options.column_sums,
            rows=options.rows,
            column_sums=options.column_sums,
        )

    def amax(self) -> jax.Array:
        """Compute the amax of the gradient in f32."""
        # Reduce in jnp: XLA then computes the values where it reduces them; a custom
        # call would read them from memory.
        with using("reference"):
            return ops.amax(self.compute())


def activated(x: ArrayLike, activation: str | ops.ClampedSwiGLU) -> Activated:
    """Activate the x of a product in the pass that quantizes it.

        # wi [k, 2, n]
        h = jaxfp8.activated(jaxfp8.dot_general(x, wi, ...), "silu_gated")
        y = jaxfp8.dot_general(
            h, wo, (((1,), (0,)), ((), ())), recipe=recipe, state=state
        )

    The activation is computed in float32 and rounded once, to FP8. Its backward keeps x
    alone, or the codes of x where the recipe has `fp8_residuals`.

    Args:
        x: bfloat16, float16 or float32 `[..., n]`; for a gated activation
            `[..., 2, n]`, gate first.
        activation: `"relu"`, `"relu_squared"`, `"silu"`, `"gelu"` (its tanh form), or
            `"silu_gated"`, `"gelu_gated"`: the activation of the gate times the other
            half; or a `jaxfp8.ops.ClampedSwiGLU`. `jaxfp8.ops.activate` has the
            formulas.

    Returns:
        An x for `jaxfp8.dot_general`, of shape `[..., n]` and the dtype of x; its
        `value` is the array.

    Raises:
        TypeError: x has another dtype.
        ValueError: `activation` is unknown, or x is not `[..., 2, n]` for a gated
            activation.
    """
    x = without_numpy(_checks.high_precision("activated", "x", x))
    _quantize_activation.check("activated", x, activation)
    return Activated(x, activation)


def normalized(
    x: ArrayLike,
    scale: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    kind: str,
    epsilon: float = 1e-6,
) -> Normalized:
    """Normalize the x of a product over its last dimension in the pass that quantizes
    it.

    The norm is computed in float32 and rounded once, to FP8. Its backward keeps x (or
    the codes of x where the recipe has `fp8_residuals`), scale and bias.

    Args:
        x: bfloat16, float16 or float32 `[..., n]`.
        scale: bfloat16, float16 or float32 `[n]`, the factor of the normalized values.
        bias: bfloat16, float16 or float32 `[n]`, added last; or None. `"rms"` takes no
            bias.
        kind: `"rms"`: `x / sqrt(mean(x**2) + epsilon)`; `"layer"`: the same formula on
            `x - mean(x)`.
        epsilon: a finite number of at least 0, in the formula above.

    Returns:
        An x for `jaxfp8.dot_general`, of the shape and dtype of x; its `value` is the
        array.

    Raises:
        TypeError: an operand has another dtype.
        ValueError: `kind` is unknown, an operand has another shape, `"rms"` comes with
            a bias, or `epsilon` is negative or not finite.
    """
    names = ("scale", "bias")
    x, scale, bias, epsilon = _quantize_norm.checked(
        "normalized", x, scale, bias, kind, epsilon, names
    )
    return Normalized(without_numpy(x), scale, bias, kind, epsilon)


def quantize_operand(
    quantizer: Any, x: jax.Array | FusedInput, scale: Any, options: OperandOptions
) -> Quantized:
    """Quantize an operand of a product, an array or a fused input; see
    `Quantizer.quantize_operand`.

    With one scale for the whole tensor, a fused input stays in f32 until it is rounded
    to FP8. Other quantizers take its values in the dtype of x.
    """
    if isinstance(x, FusedInput) and not quantizer.has_one_scale:
        x = x.value
    if isinstance(x, ActivationGradient):
        # The op has no columns for a batch of kernels.
        if options.cols != 1 + ops.is_gated(x.activation):
            x = x.compute()
    if not isinstance(x, FusedInput):
        return quantizer.quantize_operand(x, scale, options)
    chosen = quantizer.choose_scale(x.amax, scale, options.reduce)
    amax = chosen.amax
    data, data_t, amax, *sums = x.quantize_op(options)(
        chosen.scale, quantizer.fp8_dtype, amax=amax, with_amax=amax is not None
    )
    q = QTensor(data, chosen.scale_inv, data_t, recorded=amax, cols=options.cols)
    return q, *(sums or [None])


def compressed(x: jax.Array) -> QTensor:
    """Quantize x to e4m3, as bytes, with a power of two as the scale, from the amax of
    x and without state.

    Inside `shard_map` each device has a scale of its own, because the codes never leave
    the device.
    """
    quantizer = Float8CurrentScalingQuantizer(E4M3.dtype, power_2_scale=True)
    q, _ = quantizer.quantize_operand(
        x, None, OperandOptions(rows=x.ndim - 1, columnwise=False)
    )
    return as_residual(as_bytes(q))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _values(fp8_residual, fused):
    """Compute the values of a fused input; the backward computes them again and keeps
    nothing but the input.

    With `fp8_residual` the backward keeps codes of x in place of x.
    """
    del fp8_residual
    return fused.compute()


def _values_forward(fp8_residual, fused):
    values = fused.compute()
    if fp8_residual:
        fused = dataclasses.replace(fused, x=compressed(fused.x))
    return values, fused


def _values_backward(fp8_residual, fused, ct):
    if fp8_residual:
        x = as_codes(fused.x).dequantize(ct.dtype)
        fused = dataclasses.replace(fused, x=x)
    _, pullback = jax.vjp(type(fused).compute, fused)
    return pullback(ct)


_values.defvjp(_values_forward, _values_backward)
