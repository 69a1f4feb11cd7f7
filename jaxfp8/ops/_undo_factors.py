"""undo_factors: what a step recorded of each quantizer, from its old state and the
cotangent of that state, free of the factors that loss scales and sums put on it.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..numerics import _scaling
from ._amax import history_names
from ._primitive import OpOfCpus, dims

# A cast to bfloat16 and back changes a number by 0.4 % at most; two uses that were
# summed change it by 100 %.
FACTOR_TOLERANCE = 0.01
# the tolerance of a quotient of two floats, with room for fast approximations
_EXACT = 5e-5
_ROOT = float(np.sqrt(2))
_TINY = float(np.finfo(np.float32).tiny)
_INF_BITS = np.int32(0x7F800000)


def undo_factors(history, scale, new_history, new_scale):
    """Find the factor on the cotangent of each quantizer's state, and undo it.

    A step from `history` gives `[amax, h[2], ..., h[H - 1], h[0]]`, so the tail of
    `new_history` tells the factor; while the history is empty, the scale does.
    `jaxfp8.train.update_state` says which factors are undone, and what becomes of
    others.

    Args:
        history, new_history: f32 `[*batch, H]`, before and after the step.
        scale, new_scale: f32 `[*batch, 1]`.

    Returns:
        `[amax, scale_inv, stays, factor]`, f32 `[*batch, 1]`: the first three as
        `write_histories` takes them, where `stays` is 1 for a row that has no new
        entry; and the factor, NaN where the old state is below zero.

    Raises:
        TypeError: the op is differentiated.
    """
    return _UndoFactors()(history, scale, new_history, new_scale)


class _UndoFactors(OpOfCpus):
    name = "undo_factors"

    def names(self, history, *ranks):
        batch = dims("batch", history - 1)
        slots, one = history_names(self, batch), ((*batch, "one"),)
        return [slots, one, slots, one], [one] * 4

    def reference(self, history, old_scale, new_history, new_scale):
        # 1. Clean the old state as a step reads it. What is below zero stays.
        keeps = _scaling.positive_finite(history) | _scaling.below_zero(history)
        history = jnp.where(keeps, history, jnp.float32(0))
        is_scale = _scaling.positive_finite(old_scale) | _scaling.below_zero(old_scale)
        old_scale = jnp.where(is_scale, old_scale, jnp.float32(1))
        newest, amax = history[..., :1], new_history[..., :1]

        # 2. Reduce the old tail and the new one. Slot 0 of what a step rolls is the
        #    entry that it drops.
        rolled = jnp.roll(history, -1, axis=-1)
        tails = rolled[..., 1:], history[..., 1:], new_history[..., 1:]
        expected, new_tail, from_old, from_rolled = _max(_compared(*tails))
        largest_entry = jnp.maximum(expected, _entry_bits(rolled[..., :1]))
        is_below_zero = largest_entry == _INF_BITS
        is_below_zero |= _scaling.below_zero(old_scale)
        is_empty = largest_entry == 0
        expected, new_tail = _scaling.from_bits(expected), _scaling.from_bits(new_tail)
        touched = (
            jnp.isfinite(new_tail)
            & jnp.isfinite(amax)
            & jnp.isfinite(new_scale)
            & (jnp.abs(new_scale) >= _TINY)
            & ~is_below_zero
        )
        amax = _scaling.clean(amax)
        # A second optimizer, or a second gradient at one point, finds the step stored:
        # tail and scale equal those of old.
        is_done = (
            touched & (from_old < from_rolled) & (_difference(old_scale, new_scale) < 2)
        )
        touched &= ~is_done

        # 3. Find the factor of each row: from the tail of the history, or while the
        #    history is empty from the scale.
        by_scale = jnp.where(
            is_empty, _factor_of_scale(old_scale, new_scale, amax), jnp.float32(1)
        )
        by_tail = jnp.sign(new_scale) * new_tail / jnp.maximum(expected, _TINY)
        factor = jnp.where(
            touched, jnp.where(expected >= _TINY, by_tail, by_scale), jnp.float32(1)
        )

        # 4. Undo a factor that loss scales and sums make, in amax and scale. Without
        #    one nothing is divided: a division by 1 may flush a subnormal.
        is_unscaled = jnp.abs(factor - 1) <= FACTOR_TOLERANCE
        usable = touched & (is_unscaled | _is_power_of_two_or_sum(factor))
        divisor = jnp.where(usable & ~is_unscaled, factor, jnp.float32(1))
        # A sum of amaxes is already above each of them.
        largest = float(np.finfo(np.float32).max)
        undone = jnp.minimum(amax / divisor, largest)
        recorded = jnp.where(divisor < 1, undone, amax)
        scale = jnp.where(is_unscaled, new_scale, new_scale / divisor)
        scale = jnp.where(usable & _scaling.positive_finite(scale), scale, old_scale)
        # Any other factor has changed the parameters' step too: a scale below zero
        # makes the next product NaN.
        scale = jnp.where(touched & ~usable, -jnp.abs(old_scale), scale)

        # 5. A row that was not touched or cannot be used keeps its history; a stored
        #    step takes the larger amax.
        kept = jnp.where(is_done, jnp.maximum(newest, amax), newest)
        recorded = jnp.where(usable, recorded, kept)
        factor = jnp.where(is_below_zero, jnp.float32(jnp.nan), factor)
        return [recorded, scale, (~usable).astype(jnp.float32), factor]


def _compared(rolled, same, tail):
    """Return what counts of slots of the tail, int32: the old entry, the new one, and
    how the new one differs.

    Args:
        rolled, same: the entries of the old history that a step moves to these slots,
            and those that are there.
        tail: the new entries.
    """
    bits = jnp.minimum(_scaling.to_bits(tail) & 0x7FFFFFFF, _INF_BITS)
    return _entry_bits(rolled), bits, _difference(same, tail), _difference(rolled, tail)


def _entry_bits(entries):
    """Return the bits of clean entries; infinity for one below zero, as no entry is
    infinite.
    """
    return jnp.where(_scaling.below_zero(entries), _INF_BITS, _scaling.to_bits(entries))


def _max(columns):
    """Return the maximum of each of several int32 arrays along the last axis, which
    stays with a size of 1.

    One reduction of several operands is one kernel, and XLA moves none of it into what
    reads the results.
    """
    zeros = (np.int32(0),) * len(columns)
    reduced = lax.reduce(
        columns,
        zeros,
        lambda a, b: list(map(jnp.maximum, a, b)),
        (columns[0].ndim - 1,),
    )
    return [x[..., None] for x in reduced]


def _difference(a, b):
    """Return for each element 0 if a and b are equal, 1 if a cast to bfloat16 may
    explain their difference, else 2.
    """
    return jnp.where(
        jnp.abs(a - b) > FACTOR_TOLERANCE * a, 2, (a != b).astype(jnp.int32)
    )


def _is_power_of_two_or_sum(factor):
    """Tell whether loss scaling, by a power of two, or a sum over uses, by a whole
    number, makes this factor.
    """
    is_sum = (factor > 1.5) & (
        jnp.abs(factor - jnp.round(factor)) <= FACTOR_TOLERANCE * factor
    )
    return is_sum | _is_power_of_two(factor, FACTOR_TOLERANCE)


def _factor_of_scale(old, new, amax):
    """Return the factor on the scale of a quantizer with an empty history; 1 for the
    scale of the tensor at hand.

    While the history is empty a step keeps the scale, so that `new / old` is the
    factor. With `first_step="current"` the scale is that of the tensor instead:
    `amax / new` is `FP8_MAX / 2**margin`, 7 times a power of two, or with a margin of
    halves 7 times the root of one; or `new` is the smallest scale there is.
    """
    ratio = amax / (7 * jnp.abs(new))
    is_current = _is_power_of_two(ratio, _EXACT) | _is_power_of_two(
        _ROOT * ratio, _EXACT
    )
    is_current |= jnp.abs(new) <= _scaling.MIN_SCALE
    return jnp.where(is_current, jnp.float32(1), new / old)


def _is_power_of_two(x, tolerance):
    """Tell whether a float is positive, normal and a power of two, up to a relative
    tolerance.
    """
    # in [1, 2)
    significand = _scaling.from_bits(_scaling.to_bits(x) & 0x007FFFFF | 0x3F800000)
    is_near = (significand <= 1 + tolerance) | (significand >= 2 / (1 + tolerance))
    return is_near & (x >= _TINY) & jnp.isfinite(x)
