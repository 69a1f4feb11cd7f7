"""The gradient of a product whose result goes through an activation: quantized in the pass that computes it.

The backward of `activation(y)` would write the gradient of y in bfloat16, and the product that made y would read it
again for its codes. So that product takes the gradient of the activation's values and y in its place.
"""

import dataclasses
import functools
from typing import Any

import jax

from .. import ops
from ..ops._implementation import using
from ..ops._quantize_activation_grad import activation_grad, quantize_activation_grad_with
from ..recipes import OperandOptions, QTensor, has_counters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ActivationGradient:
    """The gradient of y, not computed yet: the gradient of `activation(y)` times the derivative of the activation.

    Attributes:
        y: the result of a product, `[..., n]`; gated `[..., 2, n]`.
        grad: the gradient of `ops.activate(y, activation)`, in the dtype of y.
        activation: a name that `ops.activate` takes.
    """

    y: jax.Array
    grad: jax.Array
    activation: str = dataclasses.field(metadata={"static": True})

    @property
    def value(self) -> jax.Array:
        """Return the gradient of y, in the dtype of y."""
        return jax.vjp(functools.partial(ops.activate, activation=self.activation), self.y)[1](self.grad)[0]


def quantize_gradient(
    quantizer: Any, grad: jax.Array | ActivationGradient, step: Any, options: OperandOptions
) -> tuple[QTensor, jax.Array | None]:
    """Quantize the gradient of a product's result; see `Quantizer.quantize_operand`.

    With one scale for the whole tensor, the gradient of an activation stays in f32 until it is rounded to FP8. Other
    quantizers take the gradient in the dtype of y.
    """
    if not isinstance(grad, ActivationGradient):
        return quantizer.quantize_operand(grad, step, options)
    if not quantizer.has_one_scale:
        return quantizer.quantize_operand(grad.value, step, options)
    values = functools.partial(activation_grad, grad.y, grad.grad, grad.activation)
    # The op has no columns for a batch of kernels, and counters read the values from memory.
    if options.cols != 1 + ops.is_gated(grad.activation) or has_counters(step):
        return quantizer.quantize_operand(values(), step, options)

    def current_amax():
        # Reduce in jnp: XLA then computes the values where it reduces them; a custom call would read them from memory.
        with using("reference"):
            return ops.amax(values())

    scale, scale_inv, amax = quantizer.choose_scale(current_amax, step, options.reduce)
    has_sums = options.columnwise and options.column_sums
    layout = {"transpose": options.columnwise, "rows": options.rows, "column_sums": has_sums}
    recording = {"activation": grad.activation, "amax": amax, "with_amax": amax is not None}
    data, data_t, amax, *sums = quantize_activation_grad_with(
        grad.y, grad.grad, scale, quantizer.fp8_dtype, **layout, **recording
    )
    step = quantizer.record(step, scale, scale_inv, amax, values)
    sums = sums[0] if has_sums else options.sum_rows(values()) if options.column_sums else None
    return QTensor(data, scale_inv, data_t, step=step, cols=options.cols), sums
