"""What the wrapped optimizer did with a step: applied it, skipped it, or kept it to accumulate. State does the same."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..recipes import _state_tree
from ._accumulate import maximum
from ._update import update_state


class Accumulating(NamedTuple):
    """Optimizer state where `optax.MultiSteps` is at work.

    Attributes:
        inner: the state of the wrapped transformation.
        state: for each leaf of quantizer state, in the order of the tree, the max over the mini-steps so far.
    """

    inner: Any
    state: tuple


def begin(opt_state, tree):
    """`opt_state` itself, with room for the state of mini-steps where it holds a `MultiStepsState`."""
    found = _state_tree.flatten(tree)
    if not _all(optax.MultiStepsState, opt_state) or not found.positions():
        return opt_state
    return Accumulating(opt_state, tuple(jnp.zeros_like(found.leaves[i]) for i in found.positions()))


def inner(opt_state):
    """The state of the wrapped transformation."""
    return opt_state.inner if isinstance(opt_state, Accumulating) else opt_state


def keep(before, after):
    """The optimizer state to keep after a step that had no gradient of the state."""
    return before._replace(inner=after) if isinstance(before, Accumulating) else after


def finish(old, grads, before, after, updates):
    """The next quantizer state after one step of the wrapped optimizer.

    Args:
        old: the tree that holds the state of this step; parameters in it are left alone.
        grads: the gradient with respect to `old`.
        before: the optimizer state before the step, as `begin` or `finish` gave it.
        after: the state of the wrapped transformation after it.
        updates: what the transformation made of the parameters' gradients.

    Returns:
        `old` with the next state, and the optimizer state to keep.
    """
    rejected = _rejected(_all(optax.ApplyIfFiniteState, inner(before)), _all(optax.ApplyIfFiniteState, after), updates)
    found = _state_tree.flatten(old)
    if not isinstance(before, Accumulating):
        return _where(~rejected, found, update_state(old, grads)), after

    was, now = _all(optax.MultiStepsState, inner(before)), _all(optax.MultiStepsState, after)
    emitted = _any_differs("gradient_step", was, now)
    counted = (emitted | _any_differs("mini_step", was, now)) & ~rejected
    positions, gradient = found.positions(), _state_tree.flatten(grads).by_path()
    totals = [
        maximum(so_far, gradient.get(found.paths[i], jnp.zeros_like(so_far)))
        for i, so_far in zip(positions, before.state, strict=True)
    ]
    new = found.replace(dict(zip(positions, totals, strict=True)))
    state = _where(emitted & ~rejected, found, update_state(old, new))
    pending = (
        jnp.where(emitted, jnp.zeros_like(total), jnp.where(counted, total, so_far))
        for total, so_far in zip(totals, before.state, strict=True)
    )
    return state, Accumulating(after, tuple(pending))


def _rejected(was, now, updates):
    """Whether `optax.apply_if_finite` met gradients that are not finite and made nothing of them.

    After some rejections in a row it gives up and lets them through: the updates are not finite then.
    """
    all_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates)], bool))
    return _any_differs("total_notfinite", was, now) & all_finite


def _all(kind, tree) -> list:
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def _any_differs(field, was, now):
    differ = [getattr(a, field) != getattr(b, field) for a, b in zip(was, now, strict=True)]
    return jnp.any(jnp.array(differ, bool))


def _where(condition, found, tree):
    """`tree` where the condition holds, else the state that was `found`."""
    new = _state_tree.flatten(tree).leaves
    return found.replace({i: jnp.where(condition, new[i], found.leaves[i]) for i in found.positions()})
