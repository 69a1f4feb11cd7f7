"""Follow the wrapped optimizer: store, skip or accumulate FP8 state in the steps in
which it does so to parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .._jax import _compat
from .._jax._trees import Tree
from ..numerics import _scaling
from ..ops import _checks
from ..recipes import _state_tree
from ._update import expect_state, update_state


class Accumulating(NamedTuple):
    """Optimizer state that wraps an `optax.MultiSteps`. Its steps are those of
    `inner`, for `optax.MultiSteps.has_updated` and trainers that read them.

    Attributes:
        inner: the state of the wrapped transformation.
        state: for each leaf of quantizer state, in the order of the tree, the max over
            the mini-steps so far.
    """

    inner: Any
    state: tuple

    @property
    def mini_step(self):
        return self.inner.mini_step

    @property
    def gradient_step(self):
        return self.inner.gradient_step


def begin(opt_state, tree):
    """Return `opt_state`, with room for the state of mini-steps in `tree` where it
    holds a `MultiStepsState`.

    The mini-steps of a model with other FP8 state, before a change of its recipe, are
    left out.
    """
    flat = _state_tree.flatten(tree)
    state = tuple(jnp.zeros_like(flat.leaves[i]) for i in flat.positions())
    if isinstance(opt_state, Accumulating):
        if list(map(jnp.shape, opt_state.state)) == list(map(jnp.shape, state)):
            return opt_state
        opt_state = opt_state.inner
    has_steps = state and _counters("mini_step", opt_state)
    return Accumulating(opt_state, state) if has_steps else opt_state


def inner(opt_state):
    """Return the state of the wrapped transformation."""
    return opt_state.inner if isinstance(opt_state, Accumulating) else opt_state


def step(tx, gradients, before, params, old, new, **extra) -> tuple:
    """Take one step of `tx`, and of the FP8 state where `old` holds some.

    Args:
        tx: the transformation, which sees parameters alone.
        gradients: the gradients of the parameters.
        before: the optimizer state before the step, as `begin` or `step` gave it.
        params: the parameters.
        old: the tree that holds the state of this step.
        new: the gradient with respect to `old`.
        **extra: arguments of `tx.update`.

    Returns:
        `(updates, params, state, opt_state)`, with None for the updates where `tx`
        writes the next parameters itself, which takes no `extra`.
    """
    if hasattr(tx, "apply") and not extra:
        updates, (params, after) = None, tx.apply(gradients, inner(before), params)
    else:
        updates, after = tx.update(gradients, inner(before), params, **extra)
        params = optax.apply_updates(params, updates)
    if jax.tree.leaves(old):
        return updates, params, *finish(old, new, before, after, updates)
    if isinstance(before, Accumulating):
        after = before._replace(inner=after)
    return updates, params, old, after


def finish(old, grads, before, after, updates):
    """Return the next quantizer state after one step of the wrapped optimizer.

    Args:
        old: the tree that holds the state of this step; parameters in it are left
            alone.
        grads: the gradient with respect to `old`.
        before: the optimizer state before the step, as `begin` or `finish` gave it.
        after: the state of the wrapped transformation after the step.
        updates: the updates of the parameters that the transformation gave.

    Returns:
        `old` with the next state, and the optimizer state to keep.
    """
    # 1. See whether the wrapped optimizer rejected the step. Without MultiSteps, every
    #    other step stores its state.
    rejected = _rejected(inner(before), after, updates)
    tree, gradient = expect_state(old, grads)
    if not isinstance(before, Accumulating):
        state = update_state(old, grads)
        return (state if rejected is None else _where(~rejected, old, state)), after

    # 2. See whether MultiSteps counted this mini-step, and whether it emitted an
    #    update.
    emitted = _any_differs("gradient_step", before.inner, after)
    counted = emitted | _any_differs("mini_step", before.inner, after)
    is_stored = emitted
    if rejected is not None:
        counted &= ~rejected
        is_stored = emitted & ~rejected
    # 3. Take the max with the state of the mini-steps so far. Store it in a step that
    #    emits an update; else carry it on, without a step that did not count.
    totals = {}
    pending = []
    for i, so_far in zip(tree.positions(), before.state, strict=True):
        zeros = jnp.zeros_like(so_far)
        totals[i] = maximum(so_far, gradient.get(tree.paths[i], zeros))
        kept = jnp.where(counted, totals[i], so_far)
        pending.append(jnp.where(emitted, zeros, kept))
    state = _where(is_stored, old, update_state(old, tree.replace(totals)))
    return state, Accumulating(after, tuple(pending))


def _rejected(before, after, updates):
    """Return whether `optax.apply_if_finite` met gradients that are not finite and
    dropped the step; None without an `apply_if_finite`.

    After some rejections in a row `apply_if_finite` lets such gradients through: then
    the updates are not finite.
    """
    if not _counters("total_notfinite", before):
        return None
    finite = [jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates)]
    has_met = _any_differs("total_notfinite", before, after)
    return has_met & jnp.all(jnp.array(finite, bool))


def _counters(name, opt_state) -> list:
    """Return the counters of this name in the states of optax's wrappers."""
    counters = optax.tree_utils.tree_get_all_with_path(opt_state, name)
    return [counter for _, counter in counters]


def _any_differs(name, before, after):
    was, now = (jnp.array(_counters(name, state)) for state in (before, after))
    return jnp.any(was != now)


def _where(condition, old, new):
    """Select the state of `new` where the condition holds, else that of `old`."""
    return combine(
        (old, new),
        lambda old, new: jnp.where(condition, new, old.astype(new.dtype)),
        lambda old, new: old,
        "a tree that differs at {}",
    )


def accumulate_gradients(
    acc: Tree, grads: Tree, *, weight: ArrayLike | None = None
) -> Tree:
    """Add the gradients of one more microbatch.

        # acc is None or zeros at the start
        acc = jaxfp8.accumulate_gradients(acc, grads)
        # the mean of n microbatches
        acc = jaxfp8.accumulate_gradients(acc, grads, weight=1 / n)

    Gradients of parameters add. State combines by the elementwise maximum, in which 0
    is neutral. All microbatches run on the same old state, so the result is one step of
    that state, with the largest amax of all microbatches. Never divide the sum as a
    whole, which would divide the state too: `weight` multiplies the gradients of
    parameters alone.

    Args:
        acc: the sum so far, in the structure of `grads`; at the start None, or zeros
            (`jax.tree.map(jnp.zeros_like,
            ...)`) to carry through `lax.scan`. The sum keeps the dtypes of `acc`.
        grads: gradients of one microbatch: a dict with `params` and
            `_overwrite_with_gradient`, an NNX state, or any tree that mixes parameters
            with `DotGeneralState`. State entries that are negative or not finite count
            as 0.
        weight: a real number or scalar array, the factor of parameter gradients; None
            means 1. Product and sum are in float32 at least, and take the dtype of
            `acc` then: sum narrow gradients in float32 zeros.

    Returns:
        The sum, in the structure of `grads`.

    Raises:
        TypeError: `weight` is not a real number.
        ValueError: the structures of `acc` and `grads` differ, or `weight` has a
            dimension.
    """
    if weight is not None:
        weight = _checks.array("accumulate_gradients", "weight", weight)
        if not jnp.isrealobj(weight):
            raise TypeError(
                "accumulate_gradients: weight: expected a real number, got "
                f"{weight.dtype}"
            )
        _checks.shape("accumulate_gradients", "weight", weight, ())
    if acc is None:
        acc = jax.tree.map(jnp.zeros_like, grads)
    return combine(
        (grads, acc),
        lambda grad, so_far: maximum(so_far, grad),
        lambda grad, so_far: _add(so_far, grad, weight),
        "accumulate_gradients: acc: expected the structure of grads, got a tree that "
        "differs at {}; start with None, or with zeros like the gradients",
    )


def combine(
    trees: tuple[Tree, Tree], of_state: Callable, of_others: Callable, message: str
) -> Tree:
    """Return `of_state(a, b)` for each leaf of FP8 state in two trees and
    `of_others(a, b)` for each other leaf, in the structure of the first tree.

    Raises:
        ValueError: the trees have leaves at other paths, which `message` names.
    """
    first, second = map(_state_tree.flatten, trees)
    if first.paths != second.paths:
        odd = sorted({"/".join(path) for path in {*first.paths} ^ {*second.paths}})
        raise ValueError(message.format(odd[:3]))
    state, results = set(first.positions()), {}
    for i, pair in enumerate(zip(first.leaves, second.leaves, strict=True)):
        function = of_others
        if i in state:
            function = of_state
        results[i] = function(*pair)
    return first.replace(results)


def _add(acc, grad, weight):
    if jnp.result_type(grad) == jax.dtypes.float0:
        return grad
    acc = jnp.asarray(acc)
    grad = jnp.asarray(grad)
    if weight is None:
        return acc + grad.astype(acc.dtype)
    # In float32 at least: a third in bfloat16 is off by 0.2 %, and a small product is 0
    # in float16.
    # jnp.promote_types raises where promotion is strict.
    wide = np.promote_types(np.promote_types(acc.dtype, grad.dtype), np.float32)
    total = acc.astype(wide) + grad.astype(wide) * weight.astype(wide)
    return total.astype(acc.dtype)


@jax.jit  # one operation in the caller's program
def maximum(acc, grad):
    """Return the elementwise max of state, with 0 for what is negative or not finite.

    Floats are compared by their bits, because XLA's CPU threads flush subnormal floats.
    """
    if _compat.is_max(grad):  # in the backward of a custom_vjp
        return _compat.combined(acc, grad)
    bits = [_scaling.to_bits(_scaling.clean(x)) for x in (acc, grad)]
    return _scaling.from_bits(jnp.maximum(*bits)).astype(acc.dtype)
