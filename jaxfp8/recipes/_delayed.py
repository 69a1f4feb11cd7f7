"""Delayed scaling: the scale comes from the amaxes of past steps, so that a tensor is read once.

Source: TransformerEngine's FP8 delayed scaling recipe. The stored history is its picture *before rotation*.
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
from ._amax_reduction import NOT_SAID
from ._quantizer import Quantizer, alone
from ._recipe import Recipe
from ._state import Counting, QuantizerRun, QuantizerState
from ._tensor import QTensor
from ._tensorwise import TensorwiseQuantizer


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales from a window of past amaxes.

    One step with stored `(h, s)`:

        a  = max(h)                                    # amax_compute_algo
        sf = FP8_MAX / a / 2**margin                   # 1 / s while h is empty; at most 2**126
        q  = quantize(x, sf);  s' = 1 / sf;  h' = roll(h, -1) with h'[0] = amax(x), or 0 if that is not finite

    so that the amax of step t first acts at step t + 1, and one bad step never enters the window.

    Attributes:
        margin: headroom in powers of two.
        amax_history_len: `H`, the length of the window in steps. 16 to 32 adapts faster than 1024.
        amax_compute_algo: `"max"` over the window, `"most_recent"`, or a function of the history f32 `(H,)` that
            returns an amax f32[]. Entries that were negative or not finite arrive as 0. It may close over constants,
            not over traced values.
        fp8_format: `HYBRID` (e4m3 forward, e5m2 for `grad`), `E4M3` or `E5M2`.
        first_step: the scale while the history is empty: `"unit"` is 1 (as Flax and TransformerEngine), `"current"`
            is the tensor's own, at the cost of one more read then and of a conditional always.
        pipeline_axes, precise, min_size: see `Recipe`.
        reduce_amax: of TransformerEngine's recipe, and always True here: an amax is that of the whole tensor.

    Raises:
        ValueError, TypeError: an option has a value it cannot have.
    """

    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[jax.Array], jax.Array] = "max"
    fp8_format: Format = HYBRID
    first_step: Literal["unit", "current"] = "unit"
    pipeline_axes: tuple[str, ...] = NOT_SAID
    precise: tuple[str, ...] = ("dgrad", "wgrad")
    min_size: int = 0
    reduce_amax: dataclasses.InitVar[bool] = True

    def __post_init__(self, reduce_amax: bool) -> None:
        if reduce_amax is not True:
            raise ValueError(
                f"DelayedScaling: reduce_amax: expected True, got {reduce_amax!r}; an amax is that of the whole "
                "tensor, on all devices. Stages of a pipeline have scales of their own all the same; "
                "shard_map(check_vma=False) takes their axes from pipeline_axes"
            )
        number = (int, float, np.integer, np.floating)
        is_number = isinstance(self.margin, number) and not isinstance(self.margin, bool)
        self.expect(is_number, "margin", "a number", TypeError)
        self.expect(-64 <= self.margin <= 64, "margin", "a number of powers of two between -64 and 64")
        is_length = isinstance(self.amax_history_len, (int, np.integer)) and not isinstance(self.amax_history_len, bool)
        self.expect(is_length, "amax_history_len", "an int", TypeError)
        self.expect(self.amax_history_len >= 1, "amax_history_len", "at least 1")
        is_algo = callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent")
        self.expect(is_algo, "amax_compute_algo", '"max", "most_recent" or a function of the history')
        self.expect(self.first_step in ("unit", "current"), "first_step", '"unit" or "current"')
        self.check_options()

    def quantizers(self) -> tuple[Quantizer | None, ...]:
        """The quantizers of `x`, `kernel` and `grad`."""
        forward = DelayedScalingQuantizer(
            self.fp8_format.dtype, self.margin, self.amax_history_len, self.amax_compute_algo, self.first_step
        )
        return forward, forward, dataclasses.replace(forward, fp8_dtype=self.fp8_format.backward_dtype)


@dataclasses.dataclass(frozen=True)
class DelayedScalingQuantizer(TensorwiseQuantizer):
    """Delayed scaling of one tensor; the attributes are those of `DelayedScaling`."""

    fp8_dtype: np.dtype = E4M3.dtype
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[jax.Array], jax.Array] = "max"
    first_step: Literal["unit", "current"] = "unit"

    def init(self) -> QuantizerState:
        """An empty history and scale 1."""
        return QuantizerState(
            amax_history=jnp.zeros((self.amax_history_len,), jnp.float32), scale=jnp.ones((1,), jnp.float32)
        )

    def check_state(self, name: str, state: Any) -> None:
        """Raises unless `state` is one of this quantizer, or None; `name` is how the message calls it.

        Raises:
            TypeError: not a QuantizerState of float arrays.
            ValueError: the history has another length, or a leaf another shape.
        """
        if state is None:
            return
        leaves = [getattr(state, "amax_history", None), getattr(state, "scale", None)]
        counters = getattr(state, "counters", None)
        leaves += [] if counters is None else [counters]
        if any(leaf is None or not hasattr(leaf, "shape") for leaf in leaves):
            raise TypeError(f"{name}: expected a QuantizerState of arrays, got {state!r}")
        for leaf in leaves:
            if not (_compat.is_max(leaf) or jnp.issubdtype(leaf.dtype, jnp.floating)):
                raise TypeError(f"{name}: expected float32 leaves, got {leaf.dtype}")
        history, scale = leaves[:2]
        if history.ndim != 1 or scale.shape != (1,):
            raise ValueError(
                f"{name}: expected amax_history (H,) and scale (1,), got {history.shape} and {scale.shape}; state that "
                "is stacked goes through vmap or scan together with its kernels"
            )
        if counters is not None and counters.shape != (3,):
            raise ValueError(
                f"{name}: expected counters (3,), got {counters.shape}; jaxfp8.inspect.with_counters makes them"
            )
        if history.shape != (self.amax_history_len,):
            raise ValueError(
                f"{name}: the recipe has amax_history_len={self.amax_history_len}, the state a history of "
                f"{history.size}; fit it with jaxfp8.convert.resize_history, or a whole checkpoint with "
                "jaxfp8.convert.merge_state"
            )

    def quantize(self, x: jax.Array, state: Any) -> tuple[QTensor, Any]:
        """`(QTensor, next state)` of a matrix; see `Quantizer`."""
        (run,) = start([self], [state])
        q, run, _ = self.quantize_operand(x, run)
        (state,) = finish([run])
        return q, state

    def scale(
        self, current: Callable[[], jax.Array], run: QuantizerRun | None, reduce: Callable[..., Any] = alone
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `TensorwiseQuantizer.scale`; without a state, from the amax of the tensor."""
        if run is None:
            return super().scale(current, run, reduce)
        scales = run.scale, run.scale_inv
        if run.is_empty is not None:

            def of_tensor():
                return self.scale_of(reduce(current(), run.history), run.scale_inv)

            scales = jax.lax.cond(run.is_empty, of_tensor, lambda: scales)
        return (*scales, run.amax)

    def seen(
        self,
        run: QuantizerRun | None,
        scale: jax.Array,
        scale_inv: jax.Array,
        amax: jax.Array,
        fractions: jax.Array | None = None,
    ) -> Any:
        """As `TensorwiseQuantizer.seen`."""
        if run is None:
            return None
        counting = None if run.counting is None else run.counting.after(scale_inv, fractions)
        return dataclasses.replace(run, scale=scale, scale_inv=scale_inv, amax=amax.reshape(1), counting=counting)


def start(quantizers: Sequence[Any], states: Sequence[Any]) -> list[Any]:
    """Reads the states of quantizers that run in one product; those of one delayed scaling in one operation.

    Args:
        quantizers: of any kind; or None.
        states: a state each, or None.

    Returns:
        What `quantize_operand` takes: a QuantizerRun for delayed scaling, else the state.
    """
    runs = list(states)
    alike = {}
    for i, (quantizer, state) in enumerate(zip(quantizers, states, strict=True)):
        if state is not None and isinstance(quantizer, DelayedScalingQuantizer):
            alike.setdefault((quantizer.margin, quantizer.amax_compute_algo), []).append(i)
    for (margin, algo), positions in alike.items():
        is_named = isinstance(algo, str)
        read = ops.delayed_scales(
            [states[i].amax_history for i in positions],
            [states[i].scale.reshape(1) for i in positions],
            fp8_max=[fp8_max(quantizers[i].fp8_dtype) for i in positions],
            margin=margin,
            algo=algo if is_named else "max",
        )
        for i, found in zip(positions, read, strict=True):
            quantizer, state = quantizers[i], states[i]
            scale, scale_inv, is_empty = found.scale, found.scale_inv, None
            if quantizer.first_step == "current":
                is_empty = ~jnp.any(_scaling.positive_finite(state.amax_history))
            if not is_named:
                amax = jnp.asarray(algo(_scaling.clean(state.amax_history)), jnp.float32).reshape(1)
                if is_empty is not None:  # what is stored then counts, for a tensor of zeros
                    amax = jnp.where(is_empty, jnp.zeros_like(amax), amax)
                scale, scale_inv = ops.amax_to_scale(
                    amax, state.scale.reshape(1), fp8_max=fp8_max(quantizer.fp8_dtype), margin=margin
                )
            counting = None
            if state.counters is not None:
                counting = Counting(steps=_scaling.clean(state.counters[2:]), stored=state.scale.reshape(1))
            runs[i] = QuantizerRun(found.history, scale, scale_inv, found.amax, is_empty, counting)
    return runs


def finish(runs: Sequence[Any], reduce: Callable[..., Any] = alone) -> list[Any]:
    """The next states; `reduce` as in `Quantizer.quantize_operand`."""
    delayed = [run for run in runs if isinstance(run, QuantizerRun)]
    if not delayed:
        return list(runs)
    histories = [run.history for run in delayed]
    amaxes = [reduce(run.amax.reshape(()), run.history) for run in delayed]
    pushed = iter(ops.push_amaxes(histories, amaxes))
    return [
        QuantizerState(next(pushed), run.scale_inv, _counters(run, reduce)) if isinstance(run, QuantizerRun) else run
        for run in runs
    ]


def _counters(run: QuantizerRun, reduce):
    """The next counters. Devices have shards of one size: the fraction of the whole tensor is the mean of theirs."""
    if run.counting is None:
        return None
    fractions = reduce(run.counting.fractions, run.history, jax.lax.pmean)
    return jnp.concatenate([fractions, run.counting.steps])
