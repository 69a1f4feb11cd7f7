"""Quantizers with one scale for the whole tensor: from its amax in current scaling,
from a bound in static scaling.
"""

import dataclasses
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from ..numerics import HYBRID, Format, _scaling, fp8_max
from ._quantizer import DEFAULT, FP8Quantizer, OperandOptions, Quantized, Quantizer
from ._recipe import Recipe
from ._state import Scale
from ._tensor import QTensor

# The least and the largest number above 0 that is finite in float32.
_POSITIVE_FLOAT32 = 2.0**-149, float(np.finfo(np.float32).max)


class TensorwiseQuantizer(FP8Quantizer):
    """Quantize with one scale for the whole tensor; one pass writes the codes in both
    layouts.

    Attributes:
        fp8_dtype: the dtype of the codes, float8_e4m3fn or float8_e5m2.
        margin: headroom in powers of two.
        power_2_scale: whether the scale of the tensor at hand is rounded down to a
            power of two.
    """

    has_one_scale = True
    reduces_amax = True
    margin = 0

    def quantize_operand(
        self, x: jax.Array, scale: Any, options: OperandOptions = DEFAULT
    ) -> Quantized:
        """Quantize an operand of a product; see `Quantizer.quantize_operand`."""
        # Products have checked x. Current scaling reads x for its scale. Delayed
        # scaling has a scale and an amax so far; the pass over x that writes all
        # layouts raises the amax.
        chosen = self.choose_scale(
            functools.partial(ops.amax, x), scale, options.reduce
        )
        amaxes = [] if chosen.amax is None else [chosen.amax]
        if options.columnwise:
            op = ops.QuantizeTranspose(
                self.fp8_dtype,
                with_amax=bool(amaxes),
                column_sums=options.column_sums,
                rows=options.rows,
                cols=options.cols,
            )
        else:
            op = ops.Quantize(self.fp8_dtype, with_amax=bool(amaxes))
        data, *rest = op(x, chosen.scale, *amaxes)
        data_t = rest.pop(0) if options.columnwise else None
        amax = rest.pop(0) if amaxes else None
        q = QTensor(data, chosen.scale_inv, data_t, recorded=amax, cols=options.cols)
        return q, rest[0] if rest else options.sum_rows(x)

    def choose_scale(self, current_amax: Any, scale: Any, reduce: Any) -> Scale:
        """Return the scale of a tensor, whose amax is None where the step records no
        amax.

        Args:
            current_amax: returns the amax of the tensor, f32[]. A quantizer calls it
                only where the scale may depend on the amax, and then inside a
                conditional if the state decides.
            scale: see `quantize_operand`.
            reduce: see `OperandOptions`.
        """
        old = Scale(None, jnp.ones((1,), jnp.float32), None) if scale is None else scale
        pair = ops.amax_to_scale(
            reduce(current_amax(), old.scale).reshape(1),
            old.scale_inv,
            fp8_max=fp8_max(self.fp8_dtype),
            margin=self.margin,
        )
        if self.power_2_scale:
            pair = _scaling.floor_to_power_of_two(pair[0])
        # Without a state nothing records the amax, so the pass that quantizes need not
        # find it again.
        return Scale(*pair, None)


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale for each tensor, from its own amax; no state.

        sf = FP8_MAX / amax(x)           # at most 2**126; 1 for a tensor of zeros, or
                                         # one that is not finite
        q  = quantize(x, sf)

    On a mesh the amax is that of the whole tensor, so each product waits for a
    reduction of its amax; delayed scaling reduces amaxes once a step. `ops.amax` reads
    the tensor once more.

    Source: TransformerEngine's FP8 current scaling.

    Attributes:
        fp8_format: `HYBRID` (e4m3 forward, e5m2 backward), `E4M3` or `E5M2`.
        power_2_scale: round scales down to a power of two, so that scaling itself does
            not round.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    fp8_format: Format = HYBRID
    power_2_scale: bool = False

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand; see `Recipe.quantizer_in`."""
        return Float8CurrentScalingQuantizer(dtype, self.power_2_scale)


@dataclasses.dataclass(frozen=True)
class Float8CurrentScalingQuantizer(TensorwiseQuantizer):
    """Quantize one tensor by current scaling.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        power_2_scale: see `Float8CurrentScaling`.
    """

    fp8_dtype: np.dtype
    power_2_scale: bool = False


@dataclasses.dataclass(frozen=True)
class StaticScaling(Recipe):
    """One constant scale for each operand, from a bound on its largest magnitude; no
    state and no amax.

        sf = FP8_MAX / bound  # f32, in [2**-126, 2**126]
        q  = quantize(x, sf)  # larger magnitudes saturate: they count as the bound

    A product reads each operand once, and on a mesh waits for no reduction. Nothing
    adapts: an operand beyond its bound saturates, and one far below it loses precision,
    then becomes zero. Take a bound for activations and kernels whose range training
    keeps (after a norm, or with weight decay), and None for gradients, whose range
    moves.

    Source: the constant bounds of x and kernel, with current scales of gradients, of
    published training runs on TPU v7.

    Attributes:
        input, kernel, output_grad: the bound of x, the kernel and the gradient of the
            output, in their own units; None takes the operand's own amax, as
            `Float8CurrentScaling` does.
        fp8_format: `HYBRID` (e4m3 forward, e5m2 backward), `E4M3` or `E5M2`.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError, TypeError: a bound is no number, or as float32 not above 0 and
            finite; another option has a value it cannot have.
    """

    input: float | None = 224.0
    kernel: float | None = 224.0
    output_grad: float | None = None
    fp8_format: Format = HYBRID

    def __post_init__(self) -> None:
        for name in ("input", "kernel", "output_grad"):
            bound = getattr(self, name)
            if bound is not None:
                self.expect_number(name, numbers.Real, *_POSITIVE_FLOAT32)
        super().__post_init__()

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand; see `Recipe.quantizer_in`."""
        bound = getattr(self, operand)
        if bound is None:
            return Float8CurrentScalingQuantizer(dtype)
        return StaticScalingQuantizer(dtype, bound)


@dataclasses.dataclass(frozen=True)
class StaticScalingQuantizer(TensorwiseQuantizer):
    """Quantize one tensor with the constant scale of a bound.

    Attributes:
        fp8_dtype: float8_e4m3fn or float8_e5m2.
        bound: the largest magnitude that does not saturate; see `StaticScaling`.
    """

    reduces_amax = False
    fp8_dtype: np.dtype
    bound: float

    def check_state(self, name: str, state: Any) -> None:
        """Raise unless `state` is the Scale of a frozen model; see
        `Quantizer.check_state`.
        """
        if not isinstance(state, Scale):
            super().check_state(name, state)

    def fixed_scale(self, name: str, scale: Any) -> Scale:
        """Return the constant scale, for `jaxfp8.freeze`: a file for a server has it;
        see `Quantizer.fixed_scale`.
        """
        return self.choose_scale(None, None, None)

    def choose_scale(self, current_amax: Any, scale: Any, reduce: Any) -> Scale:
        """Return the constant scale; see `TensorwiseQuantizer.choose_scale`."""
        # The quotient of two float32 in float64, rounded to float32, is rounded once.
        quotient = fp8_max(self.fp8_dtype) / float(np.float32(self.bound))
        quotient = np.clip(quotient, _scaling.MIN_SCALE, _scaling.MAX_SCALE)
        scale = np.full(1, quotient, np.float32)
        return Scale(jnp.asarray(scale), jnp.asarray(1 / scale), None)
