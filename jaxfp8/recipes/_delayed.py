"""Delayed scaling: the scale comes from the amaxes of past steps, so that a tensor is
read once.

Source: TransformerEngine's FP8 delayed scaling recipe. The stored history is its
picture *before rotation*.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import ops
from .._jax import _compat
from ..numerics import E4M3, HYBRID, Format, _scaling, fp8_max
from . import _reading
from ._quantizer import Quantizer, no_reduction
from ._recipe import Recipe
from ._state import QuantizerState, StateUse
from ._tensor import QTensor
from ._tensorwise import TensorwiseQuantizer


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
        precise, min_size, pipeline_axes, fp8_residuals: keyword-only, see `Recipe`.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: (
        Literal["max", "most_recent"] | Callable[[jax.Array], jax.Array]
    ) = "max"
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
        number = (int, float, np.integer, np.floating)
        is_number = isinstance(self.margin, number) and not isinstance(
            self.margin, bool
        )
        self.expect(is_number, "margin", "a number", TypeError)
        self.expect(
            -64 <= self.margin <= 64,
            "margin",
            "a number of powers of two between -64 and 64",
        )
        is_length = isinstance(
            self.amax_history_len, (int, np.integer)
        ) and not isinstance(self.amax_history_len, bool)
        self.expect(is_length, "amax_history_len", "an int", TypeError)
        self.expect(
            1 <= self.amax_history_len < 2**31,
            "amax_history_len",
            "at least 1, and below 2**31",
        )
        is_algo = callable(self.amax_compute_algo) or self.amax_compute_algo in (
            "max",
            "most_recent",
        )
        self.expect(
            is_algo,
            "amax_compute_algo",
            '"max", "most_recent" or a function of the history',
        )
        self.expect(
            self.first_step in ("unit", "current"), "first_step", '"unit" or "current"'
        )
        # update_state tells a first scale of the tensor at hand from a factor on the
        # state by its 7 * 2**(n / 2).
        is_told = self.first_step == "unit" or 2 * self.margin == round(2 * self.margin)
        self.expect(is_told, "margin", 'a multiple of 1/2 with first_step="current"')
        super().__post_init__()

    def quantizers(self) -> tuple[Quantizer, ...]:
        """Return the quantizers of `x`, `kernel` and `grad`."""
        options = (
            self.margin,
            self.amax_history_len,
            self.amax_compute_algo,
            self.first_step,
        )
        return self.for_formats(lambda dtype: DelayedScalingQuantizer(dtype, *options))


@dataclasses.dataclass(frozen=True)
class DelayedScalingQuantizer(TensorwiseQuantizer):
    """Quantize one tensor by delayed scaling; the attributes are those of
    `DelayedScaling`.
    """

    fp8_dtype: np.dtype = E4M3.dtype
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: (
        Literal["max", "most_recent"] | Callable[[jax.Array], jax.Array]
    ) = "max"
    first_step: Literal["unit", "current"] = "unit"

    def init(self) -> QuantizerState:
        """Return an empty history and scale 1."""
        return QuantizerState(
            amax_history=jnp.zeros((self.amax_history_len,), jnp.float32),
            scale=jnp.ones((1,), jnp.float32),
        )

    def check_state(self, name: str, state: Any) -> None:
        """Raise unless `state` is None or one of this quantizer; `name` names the
        argument in the message.

        A StateUse of `fixed_scale` is a state too, which no step updates.

        Raises:
            TypeError: `state` is not a QuantizerState of float arrays.
            ValueError: the history has another length, or a leaf another shape.
        """
        if state is None or isinstance(state, StateUse):
            return
        leaves = [getattr(state, "amax_history", None), getattr(state, "scale", None)]
        if any(leaf is None or not hasattr(leaf, "shape") for leaf in leaves):
            raise TypeError(
                f"{name}: expected a QuantizerState of arrays, got {state!r}"
            )
        for leaf in leaves:
            if getattr(leaf.dtype, "name", None) == "fp8_meta32":
                raise TypeError(
                    f"{name}: expected float32 leaves, got Flax's "
                    "fp8_ops.fp32_max_grad; pass the state as it is, and take "
                    "jaxfp8.grad or jaxfp8.value_and_grad, in which its uses combine "
                    "by max"
                )
            is_float = _compat.is_max(leaf) or jnp.issubdtype(leaf.dtype, jnp.floating)
            if not (is_float and getattr(leaf.dtype, "isnative", True)):
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
        (use,) = read_states([self], [state])
        q, _ = self.quantize_operand(x, use)
        (state,) = next_states([q], histories_of([state]))
        return q, state

    def fixed_scale(self, name: str, use: StateUse | None) -> StateUse | None:
        """Return the scale of the state, for `jaxfp8.freeze`; see
        `Quantizer.fixed_scale`.
        """
        return None if use is None else StateUse.fixed(use.scale, use.scale_inv)

    def choose_scale(
        self, current_amax: Any, use: Any, reduce: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return the scale of the state, or without a state the scale of the tensor's
        own amax.
        """
        if use is None:
            return super().choose_scale(current_amax, use, reduce)
        scales = use.scale, use.scale_inv
        if use.is_empty is not None:

            def current_scale():
                amax = reduce(current_amax(), use.scale).reshape(1)
                return ops.amax_to_scale(
                    amax,
                    use.scale_inv,
                    fp8_max=fp8_max(self.fp8_dtype),
                    margin=self.margin,
                )

            scales = jax.lax.cond(use.is_empty, current_scale, lambda: scales)
        return (*scales, use.amax)

    def record(self, use: Any, amax: jax.Array | None) -> Any:
        """Record the amax of the tensor, unless the scale is fixed; see
        `TensorwiseQuantizer.record`.
        """
        return None if amax is None else use.after(amax)


def read_states(
    quantizers: Sequence[Quantizer],
    states: Sequence[Any],
    reading: jax.Array | None = None,
    has_backward: bool = True,
) -> list[Any]:
    """Read the states of quantizers that run in one product; one op reads the states of
    equal delayed scaling.

    Args:
        quantizers: the quantizers of the product, of any kind.
        states: a state for each quantizer; None for a quantizer without state. A
            StateUse has been read already.
        reading: the reading `[6 * k]` of the product, where its state was read before a
            loop; else None.
        has_backward: whether the product is differentiated. In one that is not, a scale
            of 1 that no amax chose gives way to that of the tensor's own amax: a copy
            that never trains would keep it for ever.

    Returns:
        For each quantizer the `use` of its `quantize_operand`: a StateUse for delayed
        scaling, else the state.

    Raises:
        TypeError: there is a reading, and a quantizer that it covers is not of delayed
            scaling.
    """
    if reading is not None:
        states = _read_again(quantizers, states, reading, has_backward)
    uses = list(states)
    alike = {}
    for i, (quantizer, state) in enumerate(zip(quantizers, states, strict=True)):
        is_read = state is None or isinstance(state, StateUse)
        if isinstance(quantizer, DelayedScalingQuantizer) and not is_read:
            alike.setdefault(
                (quantizer.margin, quantizer.amax_compute_algo), []
            ).append(i)
    for (margin, algo), positions in alike.items():
        is_named = isinstance(algo, str)
        scales = ops.delayed_scales(
            [states[i].amax_history for i in positions],
            [states[i].scale.reshape(1) for i in positions],
            fp8_max=[fp8_max(quantizers[i].fp8_dtype) for i in positions],
            margin=margin,
            algo=algo if is_named else "max",
        )
        for i, read in zip(positions, scales, strict=True):
            quantizer, state = quantizers[i], states[i]
            scale, scale_inv = read.scale, read.scale_inv
            if not is_named:
                window = _window(algo, state.amax_history)
                window = jnp.where(_is_below_zero(state), jnp.float32(-1), window)
                scale, scale_inv = ops.amax_to_scale(
                    window,
                    state.scale.reshape(1),
                    fp8_max=fp8_max(quantizer.fp8_dtype),
                    margin=margin,
                )
            is_empty = _takes_own_amax(quantizer, state, scale, has_backward)
            uses[i] = StateUse(read.amax, scale, scale_inv, is_empty)
    return uses


def _read_again(quantizers, states, reading, has_backward):
    """Return the uses of states that were read before a loop, whose scales the reading
    has.

    For a quantizer with other options this is a state instead, which the loop reads: of
    the reading's two amaxes.
    """
    numbers = _reading.by_quantizer(reading)
    if not all(
        isinstance(quantizer, DelayedScalingQuantizer)
        for quantizer in quantizers[: len(numbers)]
    ):
        raise TypeError(
            "max_grad: tree: expected the QuantizerStates in a DotGeneralState with a "
            "leading dimension to be of delayed scaling, got those of "
            f"{quantizers[: len(numbers)]}; return another class from Quantizer.init"
        )
    read = list(states)
    for i, (history, old_scale, amax, scale, scale_inv) in enumerate(numbers):
        quantizer, algo = quantizers[i], quantizers[i].amax_compute_algo
        if states[i] is not None:
            read[i] = state = QuantizerState(
                states[i].amax_history if callable(algo) else history, old_scale
            )
            if (
                algo == "max"
                and quantizer.margin == 0
                and fp8_max(quantizer.fp8_dtype) == _reading.FP8_MAX[i]
            ):
                is_empty = _takes_own_amax(quantizer, state, scale, has_backward)
                read[i] = StateUse(amax, scale, scale_inv, is_empty)
    return read


def reading_suffices(quantizers: Sequence[Quantizer]) -> bool:
    """Tell whether the reading of a product suffices for its scales: no quantizer needs
    a history or the tensor.
    """
    return all(
        isinstance(q.amax_compute_algo, str) and q.first_step == "unit"
        for q in quantizers[:3]
    )


def _window(algo, history) -> jax.Array:
    """Call a user's function for the amax of a window, f32 `(1,)`.

    An empty history gives 0, so that the stored scale counts also where the function
    has a lower bound.
    """
    history = _scaling.clean(history)
    window = jnp.asarray(algo(history), jnp.float32).reshape(1)
    return jnp.where(
        jnp.any(_scaling.positive_finite(history)), window, jnp.zeros_like(window)
    )


def _takes_own_amax(quantizer, state, scale, has_backward) -> jax.Array | None:
    """Return bool[], whether the scale is that of the tensor's own amax; None where it
    is that of the state.
    """
    # The scale of a state below zero is NaN, whatever the tensor is.
    if quantizer.first_step == "current":
        return _is_empty(state) & ~_is_below_zero(state)
    return None if has_backward else _is_empty(state) & (scale.reshape(()) == 1)


def _is_empty(state):
    return ~jnp.any(_scaling.positive_finite(state.amax_history))


def _is_below_zero(state):
    return jnp.any(_scaling.below_zero(state.amax_history)) | jnp.any(
        _scaling.below_zero(state.scale)
    )


def histories_of(states: Sequence[Any]) -> list[QuantizerState | None]:
    """Return the states that `next_states` writes: those of delayed scaling, None for
    any other.
    """
    return [state if isinstance(state, QuantizerState) else None for state in states]


def next_states(
    quantized: Sequence[QTensor | None],
    histories: Sequence[QuantizerState | None] | jax.Array,
    reduce: Callable[..., Any] = no_reduction,
) -> list[Any]:
    """Return the next state of each quantizer, from the tensor that it quantized; None
    where there is no state.

    Args:
        quantized: QTensors with the uses of their quantizers' states; None for a tensor
            that was not quantized.
        histories: the states that the step read, as `histories_of` gives them; or the
            reading of the product. With a reading the states of input and kernel are
            None, and the scale of `output_grad` holds the cotangent of the reading.
        reduce: see `OperandOptions.reduce`.
    """
    states = [None if q is None else q.use for q in quantized]
    if _reading.is_reading(histories):
        recorded = [
            use and (use.amax, q.scale_inv)
            for q, use in zip(quantized[:3], states, strict=False)
        ]
        ct = _reading.cotangent(recorded, reduce, histories)
        return [None, None, QuantizerState(None, ct), *states[3:]]
    pairs, recorded = {}, []
    for i, use in enumerate(states):
        if isinstance(use, StateUse):
            states[i], old = None, histories[i]
            if old is not None:
                pairs[i] = old.amax_history, old.scale.reshape(1)
                recorded.append(
                    (reduce(use.amax, old.amax_history), quantized[i].scale_inv)
                )
    if pairs:
        (written,) = ops.write_histories([list(pairs.values())], [recorded])
        for i, pair in zip(pairs, written, strict=True):
            states[i] = QuantizerState(*pair)
    return states
