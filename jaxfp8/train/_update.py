"""update_state: the next state from the old state and its cotangent, with a check that nothing scaled the cotangent.

Only one number per quantizer is new in a step, the amax in slot 0. The rest of the history is the old history, rolled;
a factor on the cotangent (from a sum over uses, a mean, clipping, unscaling) shows there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from .._jax._trees import Tree
from ..numerics import _scaling
from ..recipes import _state_tree

# A cast to bfloat16 and back changes a number by 0.4 % at most; two uses that were summed change it by 100 %.
_TOLERANCE = 0.01
_EXACT = 1e-4  # the tolerance of a quotient of two floats, or its logarithm, with room for fast approximations
_TINY = float(np.finfo(np.float32).tiny)


def update_state(old: Tree, new: Any) -> Tree:
    """Return the state for the next step.

    For each quantizer, and for each row where state is stacked (layers of a scan, experts, ensemble members):

        h' = [amax, h[2], ..., h[H - 1], h[0]]    # roll(h, -1) of the old history; amax is slot 0 of `new`
        s' = the scale of `new`

    A row that was not touched (its new scale is 0) or whose new numbers are not finite keeps its old value. Where `old`
    already holds a gradient of the same step, from a second optimizer for example, the two combine: slot 0 is the
    larger amax. The returned state is clean: old history entries that are not finite become 0, an old scale that is 0
    or not finite becomes 1. Old state below zero, which an optimizer that stepped on the state makes, or a factor that
    cannot be undone, is an error; in a trace it stays as it is, and its scale is NaN. The returned state is float32,
    whatever cast `old` went through.

    The old history tells what the tail of the new history must be. If the new tail is c times that, with c off from 1
    by more than 1 %, the state was summed over c uses (c > 1), or averaged, clipped or unscaled (c < 1). Outside of
    `jit` this raises. Under a trace:

        c = 2**n (a loss scale)      the factor is undone: slot 0 is `amax / min(c, 1)`, the scale `s' / c`
        c = 2, 3, ... (a sum)        the same: slot 0 is no less than the true amax
        any other c                  the scale becomes negative, so that the next product is NaN

    because any other factor, such as that of a clip or of an average over fewer than all, has changed the gradients of
    the parameters too. `jax.experimental.checkify.checkify` around the step reports each factor with the message of the
    error. While a history is empty, the scale shows the factor. A history of length 1 has no tail and cannot be checked
    once it holds an amax.

    Changes that keep the tail are not found: clips by value and `sign` from the first step on, averages of
    microbatches that include the state. Add microbatches by `accumulate_gradients`, and wrap the optimizer in
    `jaxfp8.train.optimizer`, which keeps state out of all other transformations.

    Args:
        old: the state this step ran on: a state collection, a `DotGeneralState`, a variables dict, an NNX state, or a
            tree that mixes any of these with parameters. History f32 `(..., H)`, scale f32 `(..., 1)`.
        new: the gradient with respect to `old`, in the same structure. State that is absent from it is untouched.

    Returns:
        `old` with its quantizer state replaced, in float32; all other leaves are those of `old`.

    Raises:
        ValueError: outside of `jit`: state was summed, averaged, clipped or unscaled, or is below zero. Always: the
            shapes of `old` and `new` differ, or `new` holds none of the state.
    """
    before, gradient = _state_tree.flatten(old), _state_tree.flatten(new).by_path()
    expect_state(before, gradient)
    # 1. Collect the quantizers whose leaves have the same types: each group is one call.
    alike, values, factors, old_least, new_least = {}, {}, {}, {}, {}
    for q in before.quantizers:
        positions = q.positions()
        if any(gradient.get(before.paths[i]) is None for i in positions):
            continue
        now = [before.leaves[i] for i in positions]
        then = [gradient[before.paths[i]] for i in positions]
        for argument, leaves in (("old", now), ("new", then)):
            _state_tree.slot_axis(f"update_state: {argument}: {q.name}", *leaves)
        _check_shapes(q.name, now, then)
        kind = tuple((leaf.shape, leaf.dtype, jax.typeof(leaf).sharding) for leaf in now + then)
        alike.setdefault(kind, []).append((q.name, positions, now + then))
    # 2. Compute the next state of each group, and the factors by which the gradients were multiplied on their way.
    for group in alike.values():
        results = _next_quantizers([leaves for *_, leaves in group])
        for (name, positions, _), (*leaves, factor, least) in zip(group, results, strict=True):
            values |= dict(zip(positions, leaves, strict=True))
            factors[name], old_least[name] = factor, least
    # 3. Overwrite the state of users' own quantizers.
    for i in before.unpaired:
        leaf = gradient.get(before.paths[i])
        if leaf is not None and leaf.dtype != jax.dtypes.float0:
            _check_shapes(before.name(i), [before.leaves[i]], [leaf])
            old_leaf, leaf = before.leaves[i].astype(jnp.float32), leaf.astype(jnp.float32)
            values[i] = _next_user_state(old_leaf, leaf)
            new_least[before.name(i)] = jnp.minimum(jnp.min(old_leaf, initial=0), jnp.min(leaf, initial=0))
    # 4. Report factors on the state, and numbers below zero.
    _check_not_negative(old_least, _STEPPED_ON)
    _check_factors(factors)
    _check_not_negative(new_least, _NEGATIVE)
    return before.replace(values)


def expect_state(before: _state_tree.StateTree, gradient) -> None:
    """Raise a ValueError where `gradient`, leaves by path, holds none of the state leaves of `before`."""
    positions = before.positions()
    if positions and not any(before.paths[i] in gradient for i in positions):
        raise ValueError(
            f"update_state: new: expected the gradient of {before.name(positions[0])} and the other state of old, got "
            "a tree without them; take the gradient with respect to the state as well, in NNX with jaxfp8.nnx.grad or "
            "jaxfp8.nnx.value_and_grad"
        )


_PER_EXAMPLE = (
    "this is a state for each of {count} examples, as the vmap of a gradient gives; take the max over them: "
    "grads['_overwrite_with_gradient'] = jax.tree.map(lambda a: a.max(0), grads['_overwrite_with_gradient'])"
)


def _check_shapes(name, old, new):
    shapes, expected = ([leaf.shape for leaf in leaves] for leaves in (new, old))
    if shapes == expected:
        return
    is_per_example = [shape[1:] for shape in shapes] == expected
    remedy = _PER_EXAMPLE.format(count=shapes[0][0]) if is_per_example else "pass the gradient with respect to old"
    expected, shapes = (" and ".join(map(str, each)) for each in (expected, shapes))
    raise ValueError(f"update_state: new: {name}: expected the shapes of old, {expected}, got {shapes}; {remedy}")


@jax.jit
def _next_quantizers(quantizers):
    """Return the results of `_next_quantizer` for each quantizer; all quantizers have leaves of the same types.

    The quantizers are stacked, so that the arithmetic on a whole model's state takes the launches of one quantizer.

    Args:
        quantizers: for each its old leaves, in the order of `QuantizerState`, then its new leaves.
    """
    if len(quantizers) == 1:
        return [_next_quantizer(*quantizers[0])]
    stacked = _next_quantizer(*map(jnp.stack, zip(*quantizers, strict=True)))
    return list(zip(*map(jnp.unstack, stacked), strict=True))


def _next_quantizer(old_history, old_scale, new_history, new_scale):
    """Return the next state of all rows of one quantizer.

    Returns:
        `(history, scale, factors, lowest)`. `factors` holds for each row the factor on its cotangent, `lowest` the
        smallest number of the row's old state.
    """
    # 1. Move the slots of history and scale to the last axis, clean the old state and roll it. A row with a number
    # below zero keeps it, so that it stays visible. The state's scale is the scale_inv of the last step.
    axis = _state_tree.slot_axis("update_state", old_history, old_scale)
    rows = [jnp.moveaxis(x.astype(jnp.float32), axis, -1) for x in (old_history, old_scale, new_history, new_scale)]
    history, old_scale, new_history, new_scale = rows  # [..., H] and [..., 1]
    history = jnp.where(_scaling.below_zero(history), history, _scaling.clean(history))
    is_scale = _scaling.positive_finite(old_scale) | _scaling.below_zero(old_scale)
    old_scale = jnp.where(is_scale, old_scale, jnp.float32(1))
    lowest = jnp.minimum(jnp.min(history, axis=-1, keepdims=True), old_scale)
    rolled = jnp.roll(history, -1, axis=-1)
    amax = new_history[..., :1]

    # 2. Find the factor of each row: from the tail of the history, which must be the old history rolled, or while the
    # history is empty from the scale. The two reductions have one shape; all else fuses into one kernel.
    expected, tail = (_scaling.abs_max(h[..., 1:], axis=-1)[..., None] for h in (rolled, new_history))
    touched = jnp.isfinite(tail) & jnp.isfinite(amax) & jnp.isfinite(new_scale) & (new_scale != 0)
    touched &= ~_scaling.below_zero(lowest)
    amax = _scaling.clean(amax)
    # A second optimizer, or a second gradient at one point, finds the step stored: tail and scale equal those of old.
    from_old, from_rolled = (_difference(h[..., 1:], new_history[..., 1:]) for h in (history, rolled))
    is_done = touched & (from_old < from_rolled) & (_difference(old_scale, new_scale) < 2)
    touched &= ~is_done
    is_empty = ~_scaling.positive_finite(expected) & ~_scaling.positive_finite(rolled[..., :1])
    by_scale = jnp.where(is_empty, _factor_of_scale(old_scale, new_scale, amax), jnp.float32(1))
    by_tail = jnp.sign(new_scale) * tail / jnp.maximum(expected, _TINY)
    factor = jnp.where(touched, jnp.where(expected >= _TINY, by_tail, by_scale), jnp.float32(1))

    # 3. Undo a factor that loss scales and sums make, in amax and scale. Without one nothing is divided: a division by
    # 1 may flush a subnormal.
    is_unscaled = jnp.abs(factor - 1) <= _TOLERANCE
    usable = touched & (is_unscaled | _is_power_of_two_or_sum(factor))
    divisor = jnp.where(usable & ~is_unscaled, factor, jnp.float32(1))
    # A sum of amaxes is already above each of them.
    bound = jnp.minimum(amax / jnp.minimum(divisor, 1), float(np.finfo(np.float32).max))
    amax = jnp.where(is_unscaled, amax, bound)
    scale = jnp.where(is_unscaled, new_scale, new_scale / divisor)
    scale = jnp.where(usable & _scaling.positive_finite(scale), scale, old_scale)
    # Any other factor has changed the parameters' step too: a scale below zero makes the next product NaN.
    scale = jnp.where(touched & ~usable, -jnp.abs(old_scale), scale)

    # 4. Keep the old state of a row that was not touched or cannot be used; a stored step takes the larger amax.
    newest = history[..., :1]
    larger = jnp.maximum(newest, _scaling.clean(new_history[..., :1]))
    kept = history.at[..., :1].set(jnp.where(is_done, larger, newest))
    history = jnp.where(usable, rolled.at[..., :1].set(amax), kept)
    return jnp.moveaxis(history, -1, axis), jnp.moveaxis(scale, -1, axis), factor, lowest


def _difference(a, b):
    """Return for each row 0 if a and b are equal, 1 if a cast to bfloat16 may explain their difference, else 2."""
    difference = jnp.where(jnp.abs(a - b) > _TOLERANCE * a, 2, (a != b).astype(jnp.int32))
    return jnp.max(difference, axis=-1, keepdims=True, initial=0)


def _is_power_of_two_or_sum(factor):
    """Tell whether loss scaling, by a power of two, or a sum over uses, by a whole number, makes this factor."""
    doublings = jnp.log2(jnp.where(factor > 0, factor, 1))
    is_power = (factor > 0) & (jnp.abs(doublings - jnp.round(doublings)) <= np.log2(1 + _TOLERANCE))
    return is_power | ((factor > 1.5) & (jnp.abs(factor - jnp.round(factor)) <= _TOLERANCE * factor))


def _factor_of_scale(old, new, amax):
    """Return the factor on the scale of a quantizer with an empty history; 1 for the scale of the tensor at hand.

    While the history is empty a step keeps the scale, so that `new / old` is the factor. With `first_step="current"`
    the scale is that of the tensor instead: `amax / new` is `FP8_MAX / 2**margin`, 7 times a power of two, or with a
    margin of halves 7 times the root of one; or `new` is the smallest scale there is.
    """
    halves = 2 * jnp.log2(amax / (7 * jnp.abs(new)))
    is_current = (jnp.abs(halves - jnp.round(halves)) < _EXACT) | (jnp.abs(new) <= _scaling.MIN_SCALE)
    return jnp.where(is_current, jnp.float32(1), new / old)


def _next_user_state(old, new):
    """Overwrite the state of a user's own quantizer, unless the gradient is all zero, negative or not finite."""
    is_touched = jnp.all(jnp.isfinite(new) & (new >= 0)) & jnp.any(new != 0)
    return jnp.where(is_touched, new, old)


def _on_host(values):
    """Return the values that this process can see, by one transfer.

    Values that other processes cannot see are left out, because one process must not raise alone.
    """
    concrete = {name: x for name, x in values.items() if not isinstance(x, jax.core.Tracer)}
    concrete = {name: x for name, x in concrete.items() if x.is_fully_addressable or x.is_fully_replicated}
    return jax.device_get(concrete)


_FACTOR = "update_state: {name}: the new state is {factor} times what a step from the old state gives: it was {cause}. "
_OR_STALE = ", or comes from the gradient of another step"
_REMEDIES = (
    "Pass the gradient with respect to `old`. Uses of one state must combine by max: take the gradient with "
    "jaxfp8.value_and_grad, or cast the state with jaxfp8.max_grad at the top of the loss, and add microbatches with "
    "jaxfp8.accumulate_gradients. Keep `_overwrite_with_gradient` out of clipping, loss scaling, pmean and psum, as "
    "jaxfp8.train.optimizer and jaxfp8.linen.TrainState do: clip inside of optax, or by the norm of the parameters' "
    "gradients alone, optax.global_norm(grads['params'])"
)


def _check_factors(factors):
    """Raise for a factor that is not 1; under a trace, leave a check for checkify.

    Args:
        factors: for each quantizer's name the factors of its rows.
    """
    for name, factor in factors.items():
        if isinstance(factor, jax.core.Tracer):
            most, least = jnp.max(factor), jnp.min(factor)
            worst = jnp.where(most > 1 + _TOLERANCE, most, least)  # a sum is reported before any other factor
            cause = "summed over uses or devices (more than 1), or averaged, clipped or unscaled (less than 1)"
            message = _FACTOR.format(name=name, factor="{factor}", cause=cause + _OR_STALE) + _REMEDIES
            checkify.debug_check(jnp.abs(worst - 1) <= _TOLERANCE, message, factor=worst)
    for name, factor in _on_host(factors).items():
        bad = ~(np.abs(factor - 1) <= _TOLERANCE)
        if bad.any():
            worst = factor[bad][0]
            row = f", row {tuple(map(int, np.argwhere(bad)[0][:-1]))}" if factor.size > 1 else ""
            cause = ("summed over uses or devices" if worst > 1 else "averaged, clipped or unscaled") + _OR_STALE
            raise ValueError(_FACTOR.format(name=f"{name}{row}", factor=f"{worst:.4g}", cause=cause) + _REMEDIES)


_STEPPED_ON = (
    "update_state: old: {name}: expected a state that is not negative, got {least}: an optimizer has stepped on it, or "
    "under jit the whole gradient was clipped or averaged, and its scale is NaN from then on. Keep the state out of "
    "the optimizer, as jaxfp8.train.optimizer and jaxfp8.linen.TrainState do, and out of norms, clips and averages, "
    "which are of grads['params']; repair it by jaxfp8.convert.reset_state(tree, only_bad=True)"
)
_NEGATIVE = (
    "update_state: {name}: expected a state that is not negative, as uses combine by max and 0 is unused; got {least}. "
    "Keep an offset, or the parts above and below zero; and keep the state out of code that changes gradients"
)


def _check_not_negative(least, message):
    """Raise for state with negative numbers; under a trace, leave a check for checkify.

    Args:
        least: for each name the smallest number of the state, or the smallest number of each row.
        message: the text of the error, with the fields `{name}` and `{least}`.
    """
    for name, value in least.items():
        if isinstance(value, jax.core.Tracer):
            value = jnp.min(value)
            checkify.debug_check(~(value < 0), message.format(name=name, least="{least}"), least=value)
    for name, value in _on_host(least).items():
        if np.min(value) < 0:
            raise ValueError(message.format(name=name, least=f"{np.min(value):.4g}"))
