"""delayed_scales and push_amaxes: the state of delayed scaling, for all quantizers of a layer in one launch each.

A step reads the state once (scales from the histories, which move one slot) and writes it once (the new amaxes).
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..numerics import _scaling
from . import _batching, _checks, _ffi, _shapes
from ._partition import WHOLE
from ._primitive import ONE, Op

MAX_QUANTIZERS = 16  # common/histories.h


class DelayedScale(NamedTuple):
    """The operands of one quantizer in one step.

    Attributes:
        history: f32 `[H]`, one step later: without its oldest entry, and with 0 in slot 0, where `push_amaxes` puts
            the amax of this step.
        scale, scale_inv: f32[1], as `ops.amax_to_scale` gives them.
        amax: f32[1], 0: a buffer for `ops.quantize` to raise.
    """

    history: jax.Array
    scale: jax.Array
    scale_inv: jax.Array
    amax: jax.Array


def delayed_scales(
    histories: Sequence[ArrayLike],
    stored: Sequence[ArrayLike],
    *,
    fp8_max: Sequence[float],
    margin: float = 0.0,
    algo: str = "max",
) -> list[DelayedScale]:
    """Compute the scales of several quantizers from their amax histories, which move one step.

    Equivalent to, for each quantizer:

        history = jnp.where((history > 0) & (history < inf), history, 0)
        amax = jnp.max(history)                      # history[0] with "most_recent"; -1 if an entry was below zero
        scale, scale_inv = amax_to_scale(amax, stored, fp8_max=fp8_max, margin=margin)
        history = jnp.roll(history, -1).at[0].set(0)

    Slot 0 of a history is the newest entry, slot 1 the oldest.

    Args:
        histories: k arrays f32 `[H]`; H may differ.
        stored: k arrays f32[] or f32[1]: the `scale_inv`s of the last step; their inverses are the scales of histories
            without an amax.
        fp8_max: k numbers, the largest values of the FP8 formats, 448 or 57344.
        margin: headroom in powers of two, -64 to 64.
        algo: `"max"` or `"most_recent"`.

    Returns:
        k `DelayedScale`s.

    Raises:
        TypeError: an array is not float32; or the op is differentiated.
        ValueError: an array has another shape, `algo` is unknown, the lengths differ or k is not 1 to 16.
    """
    op = "delayed_scales"
    histories = _histories(op, histories)
    stored = _one_each(op, "stored", stored, len(histories))
    if len(fp8_max) != len(histories):
        raise ValueError(f"{op}: fp8_max: expected {len(histories)} numbers, one a history, got {len(fp8_max)}")
    if algo not in ("max", "most_recent"):
        raise ValueError(f'{op}: algo: expected "max" or "most_recent", got {algo!r}')
    numerators = tuple(_scaling.scale_numerator(value, margin) for value in fp8_max)
    results = _delayed_scales(*histories, *stored, numerators=numerators, most_recent=algo == "most_recent")
    return [DelayedScale(*results[i :: len(histories)]) for i in range(len(histories))]


def push_amaxes(histories: Sequence[ArrayLike], amaxes: Sequence[ArrayLike]) -> list[jax.Array]:
    """Record the amaxes of a step: slot 0 of each history becomes the amax, or 0 where that is not finite.

    Equivalent to `history.at[0].set(jnp.where(amax < inf, amax, 0))` for each quantizer. The op works in place
    where nothing else reads the histories.

    Args:
        histories: k arrays f32 `[H]`, as `delayed_scales` gives them.
        amaxes: k arrays f32[] or f32[1], not negative.

    Returns:
        k arrays f32 `[H]`.

    Raises:
        TypeError: an array is not float32; or the op is differentiated.
        ValueError: an array has another shape, the lengths differ or k is not 1 to 16.
    """
    histories = _histories("push_amaxes", histories)
    return list(_push_amaxes(*histories, *_one_each("push_amaxes", "amaxes", amaxes, len(histories))))


def _histories(op, histories):
    if not 1 <= len(histories) <= MAX_QUANTIZERS:
        raise ValueError(f"{op}: histories: expected 1 to {MAX_QUANTIZERS}, got {len(histories)}; split them up")
    return [_checks.history(op, f"histories[{i}]", history) for i, history in enumerate(histories)]


def _one_each(op, name, values, count):
    if len(values) != count:
        raise ValueError(f"{op}: {name}: expected {count} arrays, one a history, got {len(values)}")
    return [_checks.scale(op, f"{name}[{i}]", value) for i, value in enumerate(values)]


def _names(count, scalars):
    """Name the dimensions of histories, then those of so many scalars for each history."""
    # No mesh cuts a history: the maximum of a part is no scale.
    return [*((f"{WHOLE}_slot{i}",) for i in range(count)), *[ONE] * (scalars * count)]


def _quantizers(results, operand_count, **static):
    """Return the positions of each quantizer's operands, and those of its results; `results` is their number."""
    count = operand_count // 2
    return [([i, count + i], range(i, results * count, count)) for i in range(count)]


class _DelayedScales(Op):
    name = "delayed_scales"
    batch_first = staticmethod(_batching.apart(functools.partial(_quantizers, 4)))

    def names(self, *ranks, **static):
        return _names(len(ranks) // 2, 1), _names(len(ranks) // 2, 3)

    def reference(self, *operands, vmap_dims, numerators, most_recent):
        results = []
        for history, stored, numerator in zip(*_batching.halves(operands), numerators, strict=True):
            # 1. Read the amax of the window; an entry below zero counts as infinite, so that one reduction finds both.
            is_below_zero, history = _scaling.below_zero(history), _scaling.clean(history)
            newest, length = history[..., :1], history.shape[-1]
            marked = lax.select(is_below_zero, np.full(history.shape, np.inf, np.float32), history)
            largest = _scaling.abs_max(marked, axis=-1).reshape(newest.shape)
            amax = jnp.where(largest == jnp.inf, jnp.float32(-1), newest if most_recent else largest)
            # 2. Move the history: drop slot 1, the oldest, and free slot 0.
            moved = lax.concatenate([jnp.zeros_like(newest), history[..., 2:], newest], history.ndim - 1)
            results.append(
                (moved[..., :length], *_scaling.amax_to_scale(amax, stored, numerator), jnp.zeros_like(newest))
            )
        return [part for parts in zip(*results, strict=True) for part in parts]

    def cpu(self, *operands, vmap_dims, numerators, most_recent):
        histories, stored = _batching.halves(operands)
        histories, stored = [_shapes.merge_groups(h, vmap_dims) for h in histories], [s.reshape(-1) for s in stored]
        shapes = [h.shape for h in histories] + [s.shape for s in stored] * 3
        attributes = {"numerators": np.array(numerators, np.float32), "most_recent": most_recent}
        results = _ffi.call("delayed_scales", [(s, jnp.float32) for s in shapes], *histories, *stored, **attributes)
        templates = (operands[: len(histories)], *[operands[len(histories) :]] * 3)
        return [out.reshape(x.shape) for out, x in zip(results, sum(templates, ()), strict=True)]


_delayed_scales = _DelayedScales()


class _PushAmaxes(Op):
    name = "push_amaxes"
    batch_first = staticmethod(_batching.apart(functools.partial(_quantizers, 1)))

    def names(self, *ranks):
        return _names(len(ranks) // 2, 1), _names(len(ranks) // 2, 0)

    def on_one_device_only(self):
        # In jnp XLA can move the reduction of an amax over devices out of a loop over layers.
        return True

    def reference(self, *operands, vmap_dims):
        pairs = zip(*_batching.halves(operands), strict=True)
        return [lax.dynamic_update_slice_in_dim(h, _scaling.clean(amax), 0, axis=h.ndim - 1) for h, amax in pairs]

    def cpu(self, *operands, vmap_dims):
        histories, amaxes = _batching.halves(operands)
        flat = [_shapes.merge_groups(h, vmap_dims) for h in histories]
        aliases = {i: i for i in range(len(flat))}
        results = [(h.shape, jnp.float32) for h in flat]
        pushed = _ffi.call("push_amaxes", results, *flat, *(a.reshape(-1) for a in amaxes), aliases=aliases)
        return [out.reshape(h.shape) for out, h in zip(pushed, histories, strict=True)]


_push_amaxes = _PushAmaxes()
