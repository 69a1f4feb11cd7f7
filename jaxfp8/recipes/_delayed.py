"""Delayed scaling: the scale comes from the amaxes of past steps, so that a tensor is
read once.

Source: TransformerEngine's FP8 delayed scaling recipe. The stored history is its
picture *before rotation*.
"""

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._jax import _compat
from ..numerics import E4M3, HYBRID, Format, _scaling, fp8_max
from ..ops import _checks
from . import _reading
from ._quantizer import Quantizer
from ._recipe import Recipe
from ._state import QuantizerState, Scale
from ._tensor import QTensor
from ._tensorwise import TensorwiseQuantizer

AmaxComputeAlgo = Literal["max", "most_recent"] | Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales from a window of past amaxes.

    One step with stored `(h, s)`:

        a  = max(h)                   # amax_compute_algo
        sf = FP8_MAX / a / 2**margin  # 1 / s while h is empty; at most 2**126
        q  = quantize(x, sf)
        s' = 1 / sf
        h' = roll(h, -1) with h'[0] = amax(x), or 0 if that is not finite

    so that the amax of step t first acts at step t + 1, and an amax that is not finite
    never enters the window. A negative number in h or s makes sf NaN: only an optimizer
    that stepped on the state leaves such numbers.

    A product without a backward, such as that of a copy that never trains, takes the
    tensor's own amax for a while h is empty and sf would be 1.

    Attributes:
        margin: headroom in powers of two.
        amax_history_len: `H`, the length of the window in steps. 16 to 32 adapts faster
            than 1024.
        amax_compute_algo: `"max"` over the window, `"most_recent"`, or a function of
            the history f32 `(H,)` that returns an amax f32[]. Entries that were not
            finite arrive as 0. The function may close over constants, not over traced
            values. A lower bound in the function acts once the history holds an amax.
        fp8_format: `HYBRID` (e4m3 forward, e5m2 for `grad`), `E4M3` or `E5M2`.
        first_step: the scale while the history is empty: `"unit"` is 1, as in Flax and
            TransformerEngine; `"current"` is the scale of the tensor's own amax. It
            costs one more read of the tensor in these steps, and a conditional in all
            steps. Without a backward both are that of the tensor's own amax.
        reduce_amax: keyword-only, an option of TransformerEngine's recipe. Only True is
            legal: an amax is always that of the whole tensor, on all devices.
        precise, min_size, pipeline_axes, fp8_residuals, wgrad_dtype: keyword-only, see
            `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxComputeAlgo = "max"
    fp8_format: Format = HYBRID
    first_step: Literal["unit", "current"] = "unit"
    reduce_amax: dataclasses.InitVar[bool] = dataclasses.field(
        default=True, kw_only=True
    )

    def __post_init__(self, reduce_amax: bool) -> None:
        if reduce_amax is not True:
            raise ValueError(
                f"DelayedScaling: reduce_amax: expected True, got {reduce_amax!r}; an "
                "amax is that of the whole tensor, on all devices. Stages of a "
                "pipeline have scales of their own all the same; "
                "shard_map(check_vma=False) takes their axes from pipeline_axes"
            )
        self.expect_number("margin", numbers.Real, -64, 64)
        self.expect_number("amax_history_len", numbers.Integral, 1, 2**31 - 1)
        algos = "max", "most_recent"
        is_algo = callable(self.amax_compute_algo) or self.amax_compute_algo in algos
        needed = '"max", "most_recent" or a function of the history'
        self.expect(is_algo, "amax_compute_algo", needed)
        self.expect(
            self.first_step in ("unit", "current"), "first_step", '"unit" or "current"'
        )
        # update_state tells a first scale of the tensor at hand from a factor on the
        # state by its 7 * 2**(n / 2).
        is_told = self.first_step == "unit" or 2 * self.margin == round(2 * self.margin)
        self.expect(is_told, "margin", 'a multiple of 1/2 with first_step="current"')
        super().__post_init__()

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand; see `Recipe.quantizer_in`."""
        return DelayedScalingQuantizer(
            dtype,
            self.margin,
            self.amax_history_len,
            self.amax_compute_algo,
            self.first_step,
        )


@dataclasses.dataclass(frozen=True)
class DelayedScalingQuantizer(TensorwiseQuantizer):
    """Quantize one tensor by delayed scaling; the attributes are those of
    `DelayedScaling`.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxComputeAlgo = "max"
    first_step: Literal["unit", "current"] = "unit"

    def init(self) -> QuantizerState:
        """Return an empty history and scale 1."""
        return QuantizerState(
            amax_history=jnp.zeros((self.amax_history_len,), jnp.float32),
            scale=jnp.ones((1,), jnp.float32),
        )

    def check_state(self, name: str, state: Any) -> None:
        """Raise unless `state` is one of this quantizer; `name` names the argument in
        the message.

        A Scale of `fixed_scale` is a state too, which no step updates.

        Raises:
            TypeError: `state` is not a QuantizerState of float arrays.
            ValueError: the history has another length, or a leaf another shape.
        """
        if isinstance(state, Scale):
            return
        leaves = [getattr(state, "amax_history", None), getattr(state, "scale", None)]
        for leaf in leaves:
            if not hasattr(leaf, "shape"):
                raise TypeError(
                    f"{name}: expected a QuantizerState of arrays, got {state!r}"
                )
            if not (jnp.issubdtype(leaf.dtype, jnp.floating) or _compat.is_max(leaf)):
                raise TypeError(f"{name}: expected float32 leaves, got {leaf.dtype}")
        # The shapes tell what has most likely happened: state of a stack, or of another
        # history length.
        history, scale = leaves
        if history.ndim != 1 or (
            scale.shape != (1,) and not _reading.is_reading(scale)
        ):
            raise ValueError(
                f"{name}: expected amax_history (H,) and scale (1,), got "
                f"{history.shape} and {scale.shape}; state that is stacked goes "
                "through vmap or scan together with its kernels"
            )
        if history.shape != (self.amax_history_len,):
            raise ValueError(
                f"{name}: the recipe has amax_history_len={self.amax_history_len}, "
                f"the state a history of {history.size}; fit it with "
                "jaxfp8.convert.resize_history, or a whole checkpoint with "
                "jaxfp8.convert.merge_state"
            )

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """Quantize a matrix; return `(QTensor, next state)`."""
        x = _checks.high_precision("DelayedScalingQuantizer.quantize", "x", x)
        q, _ = self.quantize_operand(x, self.scale_from(state))
        pair = state.amax_history, state.scale.reshape(1)
        [pair] = ops.write_quantizers([pair], [(q.recorded, q.scale_inv)])
        return q, QuantizerState(*pair)

    def fixed_scale(self, name: str, scale: Scale | None) -> Scale | None:
        """Return the scale of the state, for `jaxfp8.freeze`; see
        `Quantizer.fixed_scale`.
        """
        return scale

    def scale_from(self, state: QuantizerState) -> Scale:
        """Return the scale of a state, f32, in a product with a backward."""
        (scale,) = scales_from([self], [state])
        history = state.amax_history if self.first_step == "current" else None
        return scale._replace(history=history)

    def choose_scale(self, current_amax: Any, scale: Any, reduce: Any) -> Scale:
        """Return the scale of the state, or without a state the scale of the tensor's
        own amax.
        """
        choose_current = super().choose_scale
        if scale is None:
            return choose_current(current_amax, None, reduce)
        if scale.history is None:
            return scale
        # The scale of a state below zero is NaN, whatever the tensor is. A scale of 1
        # that no amax chose gives way in a product without a backward: a copy that
        # never trains would keep it for ever.
        gives_way = scale.scale == (scale.scale if self.first_step == "current" else 1)
        takes_own = gives_way.reshape(()) & is_empty(scale.history)

        def current_pair():
            return choose_current(current_amax, scale, reduce)[:2]

        pair = jax.lax.cond(takes_own, current_pair, lambda: scale[:2])
        return Scale(*pair, scale.amax)


def scales_from(
    quantizers: Sequence[DelayedScalingQuantizer], states: Sequence[QuantizerState]
) -> list[Scale]:
    """Compute the scales of states of delayed scaling, f32; one op serves quantizers
    that choose from their windows in the same way.
    """
    alike = {}
    for i, quantizer in enumerate(quantizers):
        history, algo = states[i].amax_history, quantizer.amax_compute_algo
        if callable(algo):
            history, algo = _chosen(algo, history), "max"
        largest = fp8_max(quantizer.fp8_dtype) * 2.0**-quantizer.margin
        alike.setdefault(algo, {})[i] = history, states[i].scale, largest
    scales = [None] * len(quantizers)
    for algo, group in alike.items():
        histories, old_scales, largest = zip(*group.values(), strict=True)
        results = ops.delayed_scales(histories, old_scales, fp8_max=largest, algo=algo)
        for i, result in zip(group, results, strict=True):
            scales[i] = Scale(*result)
    return scales


def _chosen(algo, history):
    """Return the amax that a user's function chooses, as a history f32 `(1,)`; below
    zero where an entry of the window is.

    A window without an amax gives 0, so that the scale stays also where the function
    has a lower bound.
    """
    amax = jnp.asarray(algo(_scaling.clean(history)), jnp.float32).reshape(1)
    amax = jnp.where(is_empty(history), 0, amax)
    return jnp.where(jnp.any(_scaling.below_zero(history)), -1, amax)


def is_empty(history: jax.Array) -> jax.Array:
    """Return bool[], whether a history f32 `(H,)` has no amax."""
    return ~jnp.any(_scaling.positive_finite(history))
