"""Delayed scaling: the scale comes from the amaxes of past steps, so that a tensor is read once.

Source: TransformerEngine's FP8 delayed scaling recipe. The stored history is its picture *before rotation*.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat, ops, scaling
from .._mesh import NOT_SAID
from ..formats import HYBRID, Format, fp8_max
from ..tensor import QTensor
from ._state import QuantizerRun, QuantizerState

PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class DelayedScaling:
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
        pipeline_axes: mesh axes over which stages differ, so that amaxes are not reduced over them. Only
            `shard_map(check_vma=False)` needs it: elsewhere types tell over which axes a state varies. Where it is
            needed and left out, amaxes are reduced over all axes, with a warning; `()` says that there are none.
        min_size: products `[m, k] @ [k, n]` with `m * n * k < min_size**3` stay in high precision: below some size the
            launches of quantization cost more than FP8 saves (docs/performance.md). 0 means none. Their state is there
            and not touched. Sizes are those of one call, under `vmap` of one member, in `shard_map` of one device.
        precise: the products, of `"fprop"`, `"dgrad"`, `"wgrad"`, that accumulate precisely. Fast accumulation is
            about 2**-14 accurate and exists on Hopper and Ada only.

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

    def __post_init__(self):
        def expect(condition, name, wanted, error=ValueError):
            if not condition:
                raise error(f"DelayedScaling: {name}: expected {wanted}, got {getattr(self, name)!r}")

        number = (int, float, np.integer, np.floating)
        expect(isinstance(self.margin, number) and not isinstance(self.margin, bool), "margin", "a number", TypeError)
        expect(-64 <= self.margin <= 64, "margin", "a number of powers of two between -64 and 64")
        is_length = isinstance(self.amax_history_len, (int, np.integer)) and not isinstance(self.amax_history_len, bool)
        expect(is_length, "amax_history_len", "an int", TypeError)
        expect(self.amax_history_len >= 1, "amax_history_len", "at least 1")
        is_algo = callable(self.amax_compute_algo) or self.amax_compute_algo in ("max", "most_recent")
        expect(is_algo, "amax_compute_algo", '"max", "most_recent" or a function of the history')
        expect(isinstance(self.fp8_format, Format), "fp8_format", "jaxfp8.HYBRID, E4M3 or E5M2", TypeError)
        expect(self.first_step in ("unit", "current"), "first_step", '"unit" or "current"')
        expect(not isinstance(self.pipeline_axes, str), "pipeline_axes", "a tuple of mesh axis names", TypeError)
        if self.pipeline_axes is not NOT_SAID:
            object.__setattr__(self, "pipeline_axes", tuple(self.pipeline_axes))
        expect(not isinstance(self.precise, str), "precise", f"a tuple of names out of {PRODUCTS}", TypeError)
        object.__setattr__(self, "precise", tuple(self.precise))
        expect(set(self.precise) <= set(PRODUCTS), "precise", f"names out of {PRODUCTS}")
        is_size = isinstance(self.min_size, (int, np.integer)) and not isinstance(self.min_size, bool)
        expect(is_size, "min_size", "an int", TypeError)
        expect(self.min_size >= 0, "min_size", "at least 0")

    def quantizers(self) -> tuple["DelayedScalingQuantizer", ...]:
        """The quantizers of `x`, `kernel` and `grad`."""
        forward = DelayedScalingQuantizer(
            self.fp8_format.dtype, self.margin, self.amax_history_len, self.amax_compute_algo, self.first_step
        )
        return forward, forward, dataclasses.replace(forward, fp8_dtype=self.fp8_format.backward_dtype)


def _alone(amax, leaf):
    """No mesh: the amax at hand is that of the whole tensor."""
    del leaf
    return amax


@dataclasses.dataclass(frozen=True)
class DelayedScalingQuantizer:
    """Delayed scaling of one tensor; the attributes are those of `DelayedScaling`."""

    fp8_dtype: np.dtype
    margin: float = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[jax.Array], jax.Array] = "max"
    first_step: Literal["unit", "current"] = "unit"

    def init(self) -> QuantizerState:
        """An empty history and scale 1."""
        return QuantizerState(
            amax_history=jnp.zeros((self.amax_history_len,), jnp.float32), scale=jnp.ones((1,), jnp.float32)
        )

    def check_state(self, name: str, state) -> None:
        """Raises unless `state` is one of this quantizer, or None; `name` is how the message calls it.

        Raises:
            TypeError: not a QuantizerState of float arrays.
            ValueError: the history has another length, or a leaf another shape.
        """
        if state is None:
            return
        leaves = getattr(state, "amax_history", None), getattr(state, "scale", None)
        if any(leaf is None or not hasattr(leaf, "shape") for leaf in leaves):
            raise TypeError(f"{name}: expected a QuantizerState of arrays, got {state!r}")
        for leaf in leaves:
            if not (_compat.is_max(leaf) or jnp.issubdtype(leaf.dtype, jnp.floating)):
                raise TypeError(f"{name}: expected float32 leaves, got {leaf.dtype}")
        history, scale = leaves
        if history.ndim != 1 or scale.shape != (1,):
            raise ValueError(
                f"{name}: expected amax_history (H,) and scale (1,), got {history.shape} and {scale.shape}; state that "
                "is stacked goes through vmap or scan together with its kernels"
            )
        if history.shape != (self.amax_history_len,):
            raise ValueError(
                f"{name}: the recipe has amax_history_len={self.amax_history_len}, the state a history of "
                f"{history.size}; fit it with jaxfp8.convert.resize_history, or a whole checkpoint with "
                "jaxfp8.convert.merge_state"
            )

    def quantize(self, x, run: QuantizerRun | None, *, rows=1, cols=1, transpose=True, sums=False, reduce=_alone):
        """Quantizes `x` with the scale that its state gave; without a state, with the scale of its own amax.

        Args:
            x: bfloat16, float16 or float32 `[..., *rows, *cols]`; one scale for all of it.
            run: what `start` made of the state, or None.
            rows, cols: how many dimensions are rows and columns.
            transpose: also give `data_t`.
            sums: also give the sums over rows, f32 `[..., *cols]`.
            reduce: `(amax, state leaf or None) -> amax`, over the devices that share the state.

        Returns:
            `(q, run, sums or None)`: the codes, and the run with the amax of x in it.
        """
        scale, scale_inv, amax = self.scale(lambda: ops.amax(x), run, reduce)
        data_t = total = None
        if transpose:
            options = {"rows": rows, "cols": cols, "amax": amax, "column_sums": sums}
            data, data_t, amax, *more = ops.quantize_transpose(x, scale, self.fp8_dtype, **options)
            total = more[0] if sums else None
        else:
            data, amax = ops.quantize(x, scale, self.fp8_dtype, amax=amax)
            if sums:
                first = x.ndim - rows - cols
                total = jnp.sum(x.astype(jnp.float32), axis=tuple(range(first, first + rows)))
        if run is not None:
            run = dataclasses.replace(run, scale=scale, scale_inv=scale_inv, amax=amax.reshape(1))
        return QTensor(data, scale_inv, data_t), run, total

    def scale(self, current, run: QuantizerRun | None, reduce=_alone):
        """`(scale, scale_inv, amax so far)`, each f32[1]; the amax is None where there is no state.

        Args:
            current: gives the amax of the tensor; called, and inside a conditional, only where the scale may need it.
            run, reduce: as of `quantize`.
        """

        def of_tensor(leaf, stored):
            amax = reduce(current(), leaf).reshape(1)
            return ops.amax_to_scale(amax, stored, fp8_max=fp8_max(self.fp8_dtype), margin=self.margin)

        if run is None:
            return (*of_tensor(None, jnp.ones((1,), jnp.float32)), None)
        scales = run.scale, run.scale_inv
        if run.is_empty is not None:
            scales = jax.lax.cond(run.is_empty, lambda: of_tensor(run.history, run.scale_inv), lambda: scales)
        return (*scales, run.amax)


def start(quantizers, states) -> list[QuantizerRun | None]:
    """Reads the states of quantizers that run in one product; those of one recipe in one operation.

    Args:
        quantizers: of type DelayedScalingQuantizer.
        states: a QuantizerState each, or None.
    """
    runs = [None] * len(quantizers)
    alike = {}
    for i, (quantizer, state) in enumerate(zip(quantizers, states, strict=True)):
        if state is not None:
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
                is_empty = ~jnp.any(scaling.positive_finite(state.amax_history))
            if not is_named:
                amax = jnp.asarray(algo(scaling.clean(state.amax_history)), jnp.float32).reshape(1)
                if is_empty is not None:  # what is stored then counts, for a tensor of zeros
                    amax = jnp.where(is_empty, jnp.zeros_like(amax), amax)
                scale, scale_inv = ops.amax_to_scale(
                    amax, state.scale.reshape(1), fp8_max=fp8_max(quantizer.fp8_dtype), margin=margin
                )
            runs[i] = QuantizerRun(found.history, scale, scale_inv, found.amax, is_empty)
    return runs


def finish(runs, reduce=_alone) -> list[QuantizerState | None]:
    """The next states, in one operation; `reduce` as in `DelayedScalingQuantizer.quantize`."""
    kept = [run for run in runs if run is not None]
    if not kept:
        return list(runs)
    histories = [run.history for run in kept]
    amaxes = [reduce(run.amax.reshape(()), run.history) for run in kept]
    pushed = iter(ops.push_amaxes(histories, amaxes))
    return [None if run is None else QuantizerState(amax_history=next(pushed), scale=run.scale_inv) for run in runs]
