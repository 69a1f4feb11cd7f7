"""update_state: the next state from the old state and its cotangent, with a check that
nothing scaled the cotangent.

Only one number per quantizer is new in a step, the amax in slot 0. The rest of the
history is the old history, rolled; a factor on the cotangent (from a sum over uses, a
mean, clipping, unscaling) shows there.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import ops
from .._jax._trees import Tree
from ..numerics import _scaling
from ..recipes import _below_zero, _state_tree

# A cast to bfloat16 and back changes a number by 0.4 % at most; two uses that were
# summed change it by 100 %.
_TOLERANCE = 0.01
# the tolerance of a quotient of two floats, with room for fast approximations
_EXACT = 5e-5
_ROOT = float(np.sqrt(2))
_TINY = float(np.finfo(np.float32).tiny)
_INF_BITS = np.int32(0x7F800000)


def update_state(old: Tree, new: Any) -> Tree:
    """Return the state for the next step.

    For each quantizer, and for each row where state is stacked (layers of a scan,
    experts, ensemble members):

        h' = [amax, h[2], ..., h[H - 1], h[0]]    # roll(h, -1) of the old history; amax
                                                  # is slot 0 of `new`
        s' = the scale of `new`

    A row that was not touched (its new scale is 0) or whose new numbers are not finite
    keeps its old value. Where `old` already holds a gradient of the same step, from a
    second optimizer for example, the two combine: slot 0 is the larger amax. The
    returned state is clean: old history entries that are not finite become 0, an old
    scale that is 0 or not finite becomes 1. Old state below zero, which an optimizer
    that stepped on the state makes, or a factor that cannot be undone, is an error; in
    a trace it stays as it is, and its scale is NaN. The returned state is float32,
    whatever cast `old` went through.

    The old history tells what the tail of the new history must be. If the new tail is c
    times that, with c off from 1 by more than 1 %, the state was summed over c uses
    (c > 1), or averaged, clipped or unscaled (c < 1). Outside of `jit` this raises.
    Under a trace:

        c = 2**n (a loss scale)   the factor is undone: slot 0 is `amax / min(c, 1)`,
                                  the scale `s' / c`
        c = 2, 3, ... (a sum)     the same: slot 0 is no less than the true amax
        any other c               the scale becomes negative, so that the next product
                                  is NaN

    because any other factor, such as that of a clip or of an average over fewer than
    all, has changed the gradients of the parameters too. Nobody is told the cause
    there: the next call outside of `jit`, `jaxfp8.inspect.summary` and
    `jaxfp8.convert.reset_state` name the quantizers. While a history is empty, the
    scale shows the factor. A history of length 1 has no tail and cannot be checked once
    it holds an amax.

    Changes that keep the tail are not found: clips by value and `sign` from the first
    step on, averages of microbatches that include the state. Add microbatches by
    `accumulate_gradients`, and wrap the optimizer in `jaxfp8.train.optimizer`, which
    keeps state out of all other transformations.

    Args:
        old: the state this step ran on: a state collection, a `DotGeneralState`, a
            variables dict, an NNX state, or a tree that mixes any of these with
            parameters. History f32 `(..., H)`, scale f32 `(..., 1)`.
        new: the gradient with respect to `old`, in the same structure. State that is
            absent from it is untouched.

    Returns:
        `old` with its quantizer state replaced, in float32; all other leaves are those
        of `old`.

    Raises:
        ValueError: outside of `jit`: state was summed, averaged, clipped or unscaled,
            or is below zero. Always: the shapes of `old` and `new` differ, or `new`
            holds none of the state.
    """
    before, gradient = _state_tree.flatten(old), _state_tree.flatten(new).by_path()
    expect_state(before, gradient)
    # 1. Collect the quantizers whose leaves have the same types: each group is one
    #    call.
    alike, values, factors, least = {}, {}, {}, {}
    for q in before.quantizers:
        positions = q.positions()
        if any(gradient.get(before.paths[i]) is None for i in positions):
            continue
        now = [before.leaves[i] for i in positions]
        then = [gradient[before.paths[i]] for i in positions]
        for argument, leaves in (("old", now), ("new", then)):
            _state_tree.slot_axis(f"update_state: {argument}: {q.name}", *leaves)
        _check_shapes(q.name, now, then)
        kind = tuple(
            (leaf.shape, leaf.dtype, jax.typeof(leaf).sharding) for leaf in now + then
        )
        alike.setdefault(kind, []).append((q.name, positions, now + then))
    # 2. Compute the next state of each group, and the factors by which the gradients
    #    were multiplied on their way.
    for group in alike.values():
        histories, scales, of_group = _next_quantizers([leaves for *_, leaves in group])
        for (_, positions, _), *leaves in zip(group, histories, scales, strict=True):
            values |= dict(zip(positions, leaves, strict=True))
        factors[tuple(name for name, *_ in group)] = of_group
    # 3. Overwrite the state of users' own quantizers.
    for i in before.unpaired:
        leaf = gradient.get(before.paths[i])
        if leaf is not None and leaf.dtype != jax.dtypes.float0:
            _check_shapes(before.name(i), [before.leaves[i]], [leaf])
            old_leaf, leaf = (
                before.leaves[i].astype(jnp.float32),
                leaf.astype(jnp.float32),
            )
            values[i] = _next_user_state(old_leaf, leaf)
            if not isinstance(leaf, jax.core.Tracer):
                least[before.name(i)] = jnp.minimum(
                    jnp.min(old_leaf, initial=0), jnp.min(leaf, initial=0)
                )
    # 4. Outside of jit, report factors on the state and numbers below zero.
    factors = {
        name: rows
        for names, of_group in _on_host(factors).items()
        for name, rows in zip(names, of_group, strict=True)
    }
    if any(np.isnan(rows).any() for rows in factors.values()):
        raise ValueError(
            f"update_state: old: {_below_zero.describe(before)}{_below_zero.REPAIR}"
        )
    _check_factors(factors)
    _check_not_negative(_on_host(least))
    return before.replace(values)


def expect_state(before: _state_tree.StateTree, gradient) -> None:
    """Raise a ValueError where `gradient`, leaves by path, holds none of the state
    leaves of `before`.
    """
    positions = before.positions()
    if positions and not any(before.paths[i] in gradient for i in positions):
        raise ValueError(
            f"update_state: new: expected the gradient of {before.name(positions[0])} "
            "and the other state of old, got a tree without them; take the gradient "
            "with respect to the state as well, in NNX with jaxfp8.nnx.grad or "
            "jaxfp8.nnx.value_and_grad"
        )


_PER_EXAMPLE = (
    "this is a state for each of {count} examples, as the vmap of a gradient gives; "
    "take the max over them: grads['_overwrite_with_gradient'] = jax.tree.map(lambda "
    "a: a.max(0), grads['_overwrite_with_gradient'])"
)


def _check_shapes(name, old, new):
    shapes, expected = ([leaf.shape for leaf in leaves] for leaves in (new, old))
    if shapes == expected:
        return
    is_per_example = [shape[1:] for shape in shapes] == expected
    remedy = (
        _PER_EXAMPLE.format(count=shapes[0][0])
        if is_per_example
        else "pass the gradient with respect to old"
    )
    expected, shapes = (" and ".join(map(str, each)) for each in (expected, shapes))
    raise ValueError(
        f"update_state: new: {name}: expected the shapes of old, {expected}, got "
        f"{shapes}; {remedy}"
    )


@jax.jit
def _next_quantizers(quantizers):
    """Return the next histories and scales of quantizers whose leaves have the same
    types, and their factors.

    The quantizers are stacked, so that the arithmetic on a whole model's state takes
    the launches of one quantizer. The histories themselves are not: `write_histories`
    takes each from where it is.

    Args:
        quantizers: for each its old leaves, in the order of `QuantizerState`, then its
            new leaves.

    Returns:
        `(histories, scales, factors)`: two lists of leaves, and f32
        `[quantizers, *batch, 1]`, the factor on the cotangent of each row; NaN where
        the row's old state is below zero.
    """
    # 1. Move the slots to the last axis. The state's scale is the scale_inv of the last
    #    step.
    axis = _state_tree.slot_axis("update_state", *quantizers[0][:2])
    columns = [
        [jnp.moveaxis(x, axis, -1).astype(jnp.float32) for x in leaves]
        for leaves in zip(*quantizers, strict=True)
    ]
    # 2. Find the numbers to write, six of each row as `write_histories` takes them.
    *numbers, factors = _next_numbers(*map(_stacked, columns))
    recorded = jnp.concatenate(numbers, axis=-1)
    unread = ops.READING_NUMBERS - len(numbers)
    recorded = lax.pad(
        recorded, np.float32(0), [(0, 0, 0)] * (recorded.ndim - 1) + [(0, unread, 0)]
    )
    recorded = jnp.moveaxis(recorded, 0, -2)
    # 3. Write the histories and scales, as those of products that one call takes.
    pairs = list(zip(*columns[:2], strict=True))
    calls = [
        slice(start, start + ops.MAX_QUANTIZERS)
        for start in range(0, len(pairs), ops.MAX_QUANTIZERS)
    ]
    rows = [recorded[..., call, :] for call in calls]
    rows = [row.reshape(*row.shape[:-2], -1) for row in rows]
    written = ops.write_histories([pairs[call] for call in calls], rows)
    histories, scales = zip(*itertools.chain.from_iterable(written), strict=True)
    return *(
        [jnp.moveaxis(x, -1, axis) for x in leaves] for leaves in (histories, scales)
    ), factors


def _stacked(leaves):
    if leaves[0].ndim > 1:
        # a concatenation along the rows would move those that devices share out
        return jnp.stack(leaves)
    # without an operation for each leaf
    return lax.concatenate(leaves, 0).reshape(len(leaves), -1)


def _next_numbers(history, old_scale, new_history, new_scale):
    """Return what `write_histories` writes of each row, and the factor on its
    cotangent.

    Args:
        history, new_history: f32 `[..., H]`, before and after the step.
        old_scale, new_scale: f32 `[..., 1]`.

    Returns:
        `(amax, scale, stays, factor)`, f32 `[..., 1]`. `stays` is 1 where the row has
        no new entry.
    """
    # 1. Clean the old state as a step reads it. What is below zero stays.
    keeps = _scaling.positive_finite(history) | _scaling.below_zero(history)
    history = jnp.where(keeps, history, jnp.float32(0))
    is_scale = _scaling.positive_finite(old_scale) | _scaling.below_zero(old_scale)
    old_scale = jnp.where(is_scale, old_scale, jnp.float32(1))
    newest, oldest, amax = history[..., :1], history[..., 1:2], new_history[..., :1]

    # 2. Reduce the old tail and the new one, `new_history[..., 1:]`, which must be
    #    `[h[2], ..., h[H - 1], h[0]]`. The
    # last slot is on its own, so that nothing is rolled; and a history of length 1 has
    # no tail.
    between = _compared(history[..., 2:], history[..., 1:-1], new_history[..., 1:-1])
    last = _compared(newest, history[..., -1:], new_history[..., -1:])
    tails = _max(between)
    if history.shape[-1] > 1:
        tails = map(jnp.maximum, tails, last)
    else:
        oldest = newest
    expected, new_tail, from_old, from_rolled = tails
    oldest = _entry_bits(oldest)
    is_below_zero = (jnp.maximum(expected, oldest) == _INF_BITS) | _scaling.below_zero(
        old_scale
    )
    is_empty = jnp.maximum(expected, oldest) == 0
    expected, new_tail = _scaling.from_bits(expected), _scaling.from_bits(new_tail)
    touched = (
        jnp.isfinite(new_tail)
        & jnp.isfinite(amax)
        & jnp.isfinite(new_scale)
        & (new_scale != 0)
        & ~is_below_zero
    )
    amax = _scaling.clean(amax)
    # A second optimizer, or a second gradient at one point, finds the step stored: tail
    # and scale equal those of old.
    is_done = (
        touched & (from_old < from_rolled) & (_difference(old_scale, new_scale) < 2)
    )
    touched &= ~is_done

    # 3. Find the factor of each row: from the tail of the history, or while the history
    #    is empty from the scale.
    by_scale = jnp.where(
        is_empty, _factor_of_scale(old_scale, new_scale, amax), jnp.float32(1)
    )
    by_tail = jnp.sign(new_scale) * new_tail / jnp.maximum(expected, _TINY)
    factor = jnp.where(
        touched, jnp.where(expected >= _TINY, by_tail, by_scale), jnp.float32(1)
    )

    # 4. Undo a factor that loss scales and sums make, in amax and scale. Without one
    #    nothing is divided: a division by
    # 1 may flush a subnormal.
    is_unscaled = jnp.abs(factor - 1) <= _TOLERANCE
    usable = touched & (is_unscaled | _is_power_of_two_or_sum(factor))
    divisor = jnp.where(usable & ~is_unscaled, factor, jnp.float32(1))
    # A sum of amaxes is already above each of them.
    bound = jnp.minimum(amax / jnp.minimum(divisor, 1), float(np.finfo(np.float32).max))
    recorded = jnp.where(is_unscaled, amax, bound)
    scale = jnp.where(is_unscaled, new_scale, new_scale / divisor)
    scale = jnp.where(usable & _scaling.positive_finite(scale), scale, old_scale)
    # Any other factor has changed the parameters' step too: a scale below zero makes
    # the next product NaN.
    scale = jnp.where(touched & ~usable, -jnp.abs(old_scale), scale)

    # 5. A row that was not touched or cannot be used keeps its history; a stored step
    #    takes the larger amax.
    kept = jnp.where(is_done, jnp.maximum(newest, amax), newest)
    recorded = jnp.where(usable, recorded, kept)
    factor = jnp.where(is_below_zero, jnp.float32(jnp.nan), factor)
    return recorded, scale, (~usable).astype(jnp.float32), factor


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
    return jnp.where(jnp.abs(a - b) > _TOLERANCE * a, 2, (a != b).astype(jnp.int32))


def _is_power_of_two_or_sum(factor):
    """Tell whether loss scaling, by a power of two, or a sum over uses, by a whole
    number, makes this factor.
    """
    is_sum = (factor > 1.5) & (
        jnp.abs(factor - jnp.round(factor)) <= _TOLERANCE * factor
    )
    return is_sum | _is_power_of_two(factor, _TOLERANCE)


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


def _next_user_state(old, new):
    """Overwrite the state of a user's own quantizer, unless the gradient is all zero,
    negative or not finite.
    """
    is_touched = jnp.all(jnp.isfinite(new) & (new >= 0)) & jnp.any(new != 0)
    return jnp.where(is_touched, new, old)


def _on_host(values):
    """Return the values that this process can see, by one transfer.

    Values that other processes cannot see are left out, because one process must not
    raise alone.
    """
    concrete = {
        name: x for name, x in values.items() if not isinstance(x, jax.core.Tracer)
    }
    concrete = {
        name: x
        for name, x in concrete.items()
        if x.is_fully_addressable or x.is_fully_replicated
    }
    return jax.device_get(concrete)


_FACTOR = (
    "update_state: {name}: the new state is {factor} times what a step from the old "
    "state gives: it was {cause}, or comes from the gradient of another step. "
)
_REMEDIES = (
    "Pass the gradient with respect to `old`. Uses of one state must combine by max: "
    "take the gradient with jaxfp8.value_and_grad, or cast the state with "
    "jaxfp8.max_grad at the top of the loss, and add microbatches with "
    "jaxfp8.accumulate_gradients. Keep `_overwrite_with_gradient` out of clipping, "
    "loss scaling, pmean and psum, as jaxfp8.train.optimizer and "
    "jaxfp8.linen.TrainState do: clip inside of optax, or by the norm of the "
    "parameters' gradients alone, optax.global_norm(grads['params'])"
)


def _check_factors(factors):
    """Raise for a factor that is not 1.

    Args:
        factors: for each quantizer's name the factors of its rows, on the host.
    """
    for name, factor in factors.items():
        bad = ~(np.abs(factor - 1) <= _TOLERANCE)
        if bad.any():
            worst = factor[bad][0]
            row = (
                f", row {tuple(map(int, np.argwhere(bad)[0][:-1]))}"
                if factor.size > 1
                else ""
            )
            cause = (
                "summed over uses or devices"
                if worst > 1
                else "averaged, clipped or unscaled"
            )
            raise ValueError(
                _FACTOR.format(name=f"{name}{row}", factor=f"{worst:.4g}", cause=cause)
                + _REMEDIES
            )


_NEGATIVE = (
    "update_state: {name}: expected a state that is not negative, as uses combine by "
    "max and 0 is unused; got {least}. Keep an offset, or the parts above and below "
    "zero; and keep the state out of code that changes gradients"
)


def _check_not_negative(least):
    """Raise for state of users' own quantizers that is below zero; `least` is the
    smallest number by name.
    """
    for name, value in least.items():
        if value < 0:
            raise ValueError(_NEGATIVE.format(name=name, least=f"{value:.4g}"))
