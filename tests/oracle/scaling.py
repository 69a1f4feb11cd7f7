"""The oracle for delayed scaling (see `__init__.py`): the state of a quantizer, step by
step.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from oracle.codec import F32, SCALE_MAX, SCALE_MIN, Format, amax, quantize


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `DelayedScaling` that change numbers."""

    margin: int = 0
    amax_compute_algo: str | Callable = "max"
    first_step: str = "unit"


DEFAULTS = Options()


@dataclasses.dataclass(frozen=True)
class State:
    """The state of one quantizer: `amax_history` f32 (H,), slot 0 newest; `scale` f32
    scalar, a scale_inv.
    """

    amax_history: np.ndarray
    scale: np.float32

    @staticmethod
    def init(length: int) -> "State":
        return State(np.zeros(length, F32), F32(1))


def is_below_zero(x) -> np.ndarray:
    """Whether an optimizer has stepped on it: -inf <= x < 0, by the bits, which no
    flushing thread changes.
    """
    bits = np.asarray(x, F32).view(np.uint32).astype(np.int64)
    return (bits > 0x80000000) & (bits <= 0xFF800000)


def clean_history(history) -> np.ndarray:
    """The history as it is read: f32, entries that are negative or not finite count
    as 0.
    """
    history = np.asarray(history).astype(F32)
    return np.where(np.isfinite(history) & (history > 0), history, F32(0)).astype(F32)


def scale_pair(amax, stored, numerator) -> tuple[np.ndarray, np.ndarray]:
    """(scale, scale_inv) of each amax: numerator / amax, else 1 / stored, else 1;
    correctly rounded. NaN below zero.

    The divisor is clamped, so that scale and scale_inv are in [2**-126, 2**126]; a
    subnormal amax counts as 2**-126. The quotients are formed in f64: rounding one
    twice is harmless (53 >= 2 * 24 + 2 bits).
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs
        is_state = ~(is_below_zero(amax) | is_below_zero(stored))
        amax = np.asarray(amax, np.float64)
        stored = np.asarray(stored, np.float64)
        numerator = float(numerator)
    low, high = float(SCALE_MIN), float(SCALE_MAX)
    smallest = max(numerator / high, low)
    largest = min(numerator / low, float(np.finfo(F32).max))
    has_amax, has_stored = ((v > 0) & (v < np.inf) for v in (amax, stored))
    divisor = np.where(
        has_amax,
        np.clip(amax, smallest, largest),
        np.where(has_stored, np.clip(stored, low, high), 1),
    )
    scale = np.where(
        is_state, np.where(has_amax, numerator, 1) / divisor, np.nan
    ).astype(F32)
    return scale, (1 / scale.astype(np.float64)).astype(F32)


def amax_to_scale(a, fmt: Format, margin: int = 0) -> np.float32:
    """FP8_MAX / a / 2**margin, with an integer margin: dividing by 2**margin is exact,
    so the order is free.
    """
    return F32(scale_pair(a, 1, fmt.max / 2.0**margin)[0])


def select_scale(
    state: State, fmt: Format, options: Options = DEFAULTS, current_amax=None
) -> np.float32:
    """The scale of this step, from the stored history and scale (and the tensor in hand
    for first_step="current").
    """
    history = clean_history(state.amax_history)
    algorithm = options.amax_compute_algo
    if is_below_zero(np.asarray(state.amax_history).astype(F32)).any():
        a = -1
    elif not history.any():
        a = current_amax if options.first_step == "current" else 0
    elif algorithm == "max":
        a = history.max()
    elif algorithm == "most_recent":
        a = history[0]
    else:
        a = algorithm(history)
    stored = np.asarray(state.scale).astype(F32).reshape(())
    return F32(scale_pair(F32(a), stored, fmt.max / 2.0**options.margin)[0])


def delayed_scale(history, stored, numerator, most_recent=False):
    """(scale, scale_inv) of one quantizer before a step."""
    is_stepped_on = np.any(is_below_zero(history))
    history = clean_history(history)
    amax = F32(-1) if is_stepped_on else history[0] if most_recent else history.max()
    return scale_pair(amax, stored, numerator)


def reading(history, stored, numerator=448.0) -> np.ndarray:
    """What a step needs of the state: f32 `[6]`, the newest amax, the window's, the
    scale, a 0, and two new scales.
    """
    scales = np.ravel(delayed_scale(history, np.ravel(stored), numerator))
    if np.any(is_below_zero(history)) or np.any(is_below_zero(stored)):
        return np.concatenate([F32([-1, -1]), np.ravel(stored), F32([0]), scales])
    entries = clean_history(history)
    return np.concatenate(
        [[entries[0], entries.max()], np.ravel(stored), F32([0]), scales]
    ).astype(F32)


def write_history(history, recorded) -> tuple[np.ndarray, np.float32]:
    """(next history, next scale) from the amax and the scale_inv of a step; zeros where
    the latter is 0.

    A third number that is not 0 keeps all slots but the first where they are, and
    numbers below zero as they are.
    """
    amax, scale_inv, *rest = recorded[:3]
    if scale_inv == 0:
        return np.zeros_like(history), scale_inv
    if rest and rest[0] != 0:
        entries = np.concatenate([[F32(amax)], history[1:]]).astype(F32)
        return np.where(entries < 0, entries, clean_history(entries)), scale_inv
    entries = clean_history(history)
    return np.concatenate([clean_history([amax]), entries[2:], entries[:1]])[
        : len(history)
    ], scale_inv


def next_state(state: State, scale, amax_now) -> State:
    """History rolled by -1, the oldest entry dropped, slot 0 the new amax (0 when it is
    not finite); s' = 1 / scale.
    """
    return State(*write_history(state.amax_history, (amax_now, F32(1) / F32(scale))))


def step(x, state: State, fmt: Format, options: Options = DEFAULTS):
    """One quantizer, one step: (codes, scale, next state)."""
    scale = select_scale(state, fmt, options, amax(x))
    codes, top = quantize(x, scale, fmt)
    return codes, scale, next_state(state, scale, top)
