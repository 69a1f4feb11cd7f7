"""Follow the wrapped optimizer: store, skip or accumulate FP8 state in the steps in which it does so to parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..recipes import _state_tree
from ._accumulate import maximum
from ._update import update_state


class Accumulating(NamedTuple):
    """Optimizer state that wraps an `optax.MultiSteps`.

    Attributes:
        inner: the state of the wrapped transformation.
        state: for each leaf of quantizer state, in the order of the tree, the max over the mini-steps so far.
    """

    inner: Any
    state: tuple


def begin(opt_state, tree):
    """Return `opt_state`, with room for the state of mini-steps where it holds a `MultiStepsState`."""
    flat = _state_tree.flatten(tree)
    if not _all(optax.MultiStepsState, opt_state) or not flat.positions():
        return opt_state
    return Accumulating(opt_state, tuple(jnp.zeros_like(flat.leaves[i]) for i in flat.positions()))


def inner(opt_state):
    """Return the state of the wrapped transformation."""
    return opt_state.inner if isinstance(opt_state, Accumulating) else opt_state


def keep(before, after):
    """Return the optimizer state to keep after a step that had no gradient of the state."""
    return before._replace(inner=after) if isinstance(before, Accumulating) else after


def finish(old, grads, before, after, updates):
    """Return the next quantizer state after one step of the wrapped optimizer.

    Args:
        old: the tree that holds the state of this step; parameters in it are left alone.
        grads: the gradient with respect to `old`.
        before: the optimizer state before the step, as `begin` or `finish` gave it.
        after: the state of the wrapped transformation after the step.
        updates: the updates of the parameters that the transformation gave.

    Returns:
        `old` with the next state, and the optimizer state to keep.
    """
    # 1. See whether the wrapped optimizer rejected the step. Without MultiSteps, every other step stores its state.
    rejected = _rejected(_all(optax.ApplyIfFiniteState, inner(before)), _all(optax.ApplyIfFiniteState, after), updates)
    tree = _state_tree.flatten(old)
    if not isinstance(before, Accumulating):
        return _where(~rejected, tree, update_state(old, grads)), after

    # 2. See whether MultiSteps counted this mini-step, and whether it emitted an update.
    was, now = _all(optax.MultiStepsState, inner(before)), _all(optax.MultiStepsState, after)
    emitted = _any_differs("gradient_step", was, now)
    counted = (emitted | _any_differs("mini_step", was, now)) & ~rejected
    # 3. Take the max with the state of the mini-steps so far.
    positions, gradient = tree.positions(), _state_tree.flatten(grads).by_path()
    pairs = zip(positions, before.state, strict=True)
    totals = [maximum(so_far, gradient.get(tree.paths[i], jnp.zeros_like(so_far))) for i, so_far in pairs]
    # 4. Store the max in a step that emits an update; else carry the max on, without a step that did not count.
    new = tree.replace(dict(zip(positions, totals, strict=True)))
    state = _where(emitted & ~rejected, tree, update_state(old, new))
    pending = (
        jnp.where(emitted, jnp.zeros_like(total), jnp.where(counted, total, so_far))
        for total, so_far in zip(totals, before.state, strict=True)
    )
    return state, Accumulating(after, tuple(pending))


def _rejected(was, now, updates):
    """Return whether `optax.apply_if_finite` met gradients that are not finite and dropped the step.

    After some rejections in a row `apply_if_finite` lets such gradients through: then the updates are not finite.
    """
    all_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates)], bool))
    return _any_differs("total_notfinite", was, now) & all_finite


def _all(kind, tree) -> list:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _any_differs(field, was, now):
    differ = [getattr(a, field) != getattr(b, field) for a, b in zip(was, now, strict=True)]
    return jnp.any(jnp.array(differ, bool))


def _where(condition, old, tree):
    """Select `tree` where the condition holds, else the state of `old`, a flat tree."""
    new = _state_tree.flatten(tree).leaves
    return old.replace({i: jnp.where(condition, new[i], old.leaves[i].astype(new[i].dtype)) for i in old.positions()})
