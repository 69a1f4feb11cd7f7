"""optimizer: wraps an optax transformation so that a bare optax loop overwrites quantizer state, exactly."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._jax._typing import Tree
from ..recipes import _state_tree
from . import _steps
from ._update import expect_state


def optimizer(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` for parameter trees that hold FP8 state.

        tx = jaxfp8.train.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
        opt_state = tx.init(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        variables = optax.apply_updates(variables, updates)

    `tx` sees the parameters alone: norms, weight decay and moments are those without state, and its own state has no
    entries for it. `optax.apply_updates`, and any `params + update`, puts `update_state(params, grads)` in place of
    the state, bit by bit. With `optax.MultiSteps` in `tx` the state of the mini-steps combines by max and is stored in
    the step that MultiSteps takes. A step that `optax.apply_if_finite` rejects leaves the state as it was.

    Wrap last: transformations around this one, `chain(clip, optimizer(tx))`, see the state. `update_state` undoes what
    a transformation before this one does to state. A transformation after it must not change the updates of state:
    `apply_updates` raises where one did, except that an update of all zeros leaves the state as it was.

    Args:
        tx: an optax transformation or an `optax.MultiSteps` object.

    Returns:
        A transformation for any tree that mixes parameters with state: variables dicts, NNX states, pytrees with
        `DotGeneralState`. Its `update` needs `params`.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        opt_state = _steps.begin(tx.init(_without_state(params)), params)
        paths = _state_tree.flatten(params).in_variables
        return _InVariables(opt_state, paths) if paths else opt_state

    def update(grads, opt_state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "jaxfp8.train.optimizer: update: params: expected the parameters with their FP8 state, got None; call "
                "update(grads, opt_state, params)"
            )
        paths = opt_state.paths if isinstance(opt_state, _InVariables) else None
        if paths:
            params, grads = (_state_tree.marked(tree, paths) for tree in (params, grads))
            opt_state = opt_state.inner
        expect_state(_state_tree.flatten(params), _state_tree.flatten(grads).by_path())
        updates, after = tx.update(_without_state(grads), _steps.inner(opt_state), _without_state(params), **extra_args)
        state, opt_state = _steps.finish(params, grads, opt_state, after, updates)
        return _with_state(updates, state), _InVariables(opt_state, paths) if paths else opt_state

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Tree, updates: Any) -> Tree:
    """Apply updates as `optax.apply_updates` does, also to Equinox modules: an update of None changes nothing.

    Args:
        params: any tree, with leaves that are not arrays.
        updates: what `optimizer(tx).update` returned, None where `params` does not train.

    Returns:
        `params + updates`, in the dtypes of `params`.
    """

    def apply(update, leaf):
        return leaf if update is None else jnp.asarray(leaf + update).astype(jnp.result_type(leaf))

    return jax.tree.map(apply, updates, params, is_leaf=lambda u: u is None or isinstance(u, Overwrite))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _InVariables:
    """Optimizer state that remembers which leaves were state in NNX variables: `update` gets plain arrays.

    Attributes:
        inner: the optimizer state.
        paths: of these leaves.
    """

    inner: Any
    paths: frozenset = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Overwrite:
    """An update that replaces: `leaf + Overwrite.by(value)` is `value`, where `leaf + (value - leaf)` would round.

    Attributes:
        bits: the value's bits as unsigned integers with the sign flipped. Integers, because arithmetic of
            transformations that come later changes their dtype, which is seen. Flipped, because the bits of a number
            that is not negative are then never 0: zeroed updates, as `optax.MultiSteps` and code that skips steps make
            them, leave the leaf as it is.
        dtype: the dtype of the value.
    """

    bits: jax.Array
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    # NumPy arrays leave `array + update` to this class.
    __array_ufunc__ = None

    @classmethod
    def by(cls, value) -> "Overwrite":
        """Return the update that replaces a leaf by `value`."""
        value = jnp.asarray(value)
        bits = lax.bitcast_convert_type(value, _unsigned(value.dtype))
        return cls(bits ^ _sign(value.dtype), value.dtype)

    def __radd__(self, leaf):
        leaf = jnp.asarray(leaf)
        if self.bits.dtype != _unsigned(self.dtype) or self.bits.shape != leaf.shape:
            raise TypeError(
                "jaxfp8.train.optimizer: the update of FP8 state was changed by a transformation around the optimizer; "
                "wrap last: jaxfp8.train.optimizer(optax.chain(...))"
            )
        value = lax.bitcast_convert_type(self.bits ^ _sign(self.dtype), self.dtype)
        return jnp.where(self.bits == 0, leaf, value.astype(leaf.dtype))

    __add__ = __radd__


def _unsigned(dtype) -> np.dtype:
    return np.dtype(f"uint{8 * dtype.itemsize}")


def _sign(dtype):
    return np.asarray(1 << (8 * dtype.itemsize - 1), _unsigned(dtype))


def _without_state(tree) -> Any:
    """Return `tree` with an empty node in the place of each leaf of state."""
    flat = _state_tree.flatten(tree)
    return _state_tree.unmarked(flat.replace({i: optax.MaskedNode() for i in flat.positions()}))


def _with_state(updates, tree) -> Any:
    """Add to the `updates` of parameters an `Overwrite` for each leaf of state in `tree`."""
    flat = _state_tree.flatten(tree)
    leaves, treedef = jax.tree.flatten(updates, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    for i in flat.positions():
        leaves[i] = Overwrite.by(flat.leaves[i])
    return treedef.unflatten(leaves)
