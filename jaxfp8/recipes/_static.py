"""Static scaling: the scale comes from a bound that the user gives, so that no tensor is read for its amax."""

import dataclasses
from typing import Any

import jax
import numpy as np

from ..numerics import HYBRID, Format, _scaling, fp8_max
from ._quantizer import Quantizer
from ._recipe import Recipe
from ._tensorwise import Float8CurrentScalingQuantizer, TensorwiseQuantizer


@dataclasses.dataclass(frozen=True)
class StaticScaling(Recipe):
    """One constant scale for each operand, from a bound on its largest magnitude; no state and no amax.

        sf = FP8_MAX / bound             # f32, in [2**-126, 2**126]
        q  = quantize(x, sf)             # larger magnitudes saturate: they count as the bound

    A product reads each operand once, and on a mesh waits for no reduction. Nothing adapts: an operand beyond its bound
    saturates, and one far below it loses precision, then becomes zero. Take a bound for activations and kernels whose
    range training keeps (after a norm, or with weight decay), and None for gradients, whose range moves.

    Source: the constant bounds of x and kernel, with current scales of gradients, of published training runs on TPU v7.

    Attributes:
        input, kernel, grad: the bound of x, the kernel and the gradient of the output, in their own units; None takes
            the operand's own amax, as `Float8CurrentScaling` does.
        fp8_format: `HYBRID` (e4m3 forward, e5m2 for `grad`), `E4M3` or `E5M2`.
        precise, min_size, pipeline_axes, fp8_residuals: keyword-only, see `Recipe`.

    Raises:
        ValueError, TypeError: a bound is no number, or as float32 not above 0 and finite; another option has a value it
            cannot have.
    """

    input: float | None = 224.0
    kernel: float | None = 224.0
    grad: float | None = None
    fp8_format: Format = HYBRID

    def __post_init__(self) -> None:
        for name in ("input", "kernel", "grad"):
            bound = getattr(self, name)
            if bound is not None:
                is_number = isinstance(bound, (int, float, np.integer, np.floating)) and not isinstance(bound, bool)
                self.expect(is_number, name, "a number, or None for the tensor's own amax", TypeError)
                with np.errstate(over="ignore"):
                    self.expect(0 < np.float32(bound) < np.inf, name, "a bound above 0 and finite in float32")
        super().__post_init__()

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of `x`, `kernel` and `grad`."""
        forward, backward = self.fp8_format.dtype, self.fp8_format.backward_dtype
        return (
            _quantizer(forward, self.input),
            _quantizer(forward, self.kernel),
            _quantizer(backward, self.grad),
        )


def _quantizer(dtype: np.dtype, bound: float | None) -> Quantizer:
    return Float8CurrentScalingQuantizer(dtype) if bound is None else StaticScalingQuantizer(dtype, bound)


@dataclasses.dataclass(frozen=True)
class StaticScalingQuantizer(TensorwiseQuantizer):
    """Quantize one tensor with the constant scale of a bound.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        bound: the largest magnitude that does not saturate; see `StaticScaling`.
    """

    fp8_dtype: np.dtype
    bound: float

    def choose_scale(self, current_amax: Any, step: Any, reduce: Any) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return the constant scale; see `TensorwiseQuantizer.choose_scale`."""
        with np.errstate(over="ignore"):  # a bound near the smallest floats
            quotient = np.float32(fp8_max(self.fp8_dtype)) / np.float32(self.bound)
        scale = np.clip(quotient, np.float32(_scaling.MIN_SCALE), np.float32(_scaling.MAX_SCALE)).reshape(1)
        return jax.numpy.asarray(scale), jax.numpy.asarray(np.float32(1) / scale), None
