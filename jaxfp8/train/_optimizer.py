"""optimizer: wraps an optax transformation so that a bare optax loop overwrites
quantizer state, exactly.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._jax import _warnings
from .._jax._trees import Tree
from ..recipes import FP8StateWarning, _state_tree
from . import _steps
from ._update import expect_state


class AppliedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also write the next parameters itself.

    Attributes:
        apply: `(grads, state, params) -> (params, state)`: `update` and
            `optax.apply_updates` in one pass.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __new__(
        cls, init: Callable, update: Callable, apply: Callable | None = None
    ) -> Self:
        """Make the transformation; optax unpacks it as a pair, and so do copies."""
        transformation = super().__new__(cls, init, update)
        transformation.apply = apply
        return transformation


def optimizer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap `tx` for parameter trees that hold FP8 state.

        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
        tx = jaxfp8.train.optimizer(tx)
        opt_state = tx.init(variables)
        updates, opt_state = tx.update(grads, opt_state, variables)
        variables = optax.apply_updates(variables, updates)

    `tx` sees the parameters alone: norms, weight decay and moments leave FP8 state out,
    and the optimizer state has no entries for FP8 state. `optax.apply_updates`, and any
    `params + update`, puts `update_state(params, grads)` in place of the FP8 state,
    exact to the bit. With `optax.MultiSteps` in `tx` the state of the mini-steps
    combines by max and is stored in the step that MultiSteps takes. A step that
    `optax.apply_if_finite` rejects leaves the state as it was.

    Wrap last: transformations around this one, `chain(clip, optimizer(tx))`, see the
    state. `update_state` finds and undoes a factor that a transformation before this
    one puts on state, as `clip_by_global_norm` does; it cannot see `clip`, `sign`, or
    an average over other steps (`ema`, `trace`, `MultiSteps(optimizer(tx))`). A
    transformation after this one must not change the updates of state: `apply_updates`
    raises where one did. Where updates of two optimizers were added up it makes the
    state negative, and the next `update_state` raises. An update of all zeros leaves
    the state as it was. Log norms of `updates["params"]`.

    Extra arguments that `update` takes by name (`grad`, `value_fn` of `optax.lbfgs`,
    `grad_fn` of an opaque `optax.contrib.sam`) reach `tx` as trees, or functions of
    trees, without state. `tx` keeps no gradient of state, so
    `optax.value_and_grad_from_state` cannot be used. With `optax.lookahead` both the
    fast and the slow parameters get the next state of the fast parameters.

    Args:
        tx: an optax transformation or an `optax.MultiSteps` object.

    Returns:
        A transformation for any tree that mixes parameters with state: variables dicts,
        NNX states, pytrees with `DotGeneralState`. Its `update` raises a ValueError
        without `params`, and where `grads` holds none of the state; its `init` raises
        one for the NNX variables of a `CustomRecipe` with state. It can `apply`
        where `tx` can (`jaxfp8.optim.adamw`): `variables, opt_state = tx.apply(grads,
        opt_state, variables)` writes the next parameters and the next FP8 state.
    """
    return _wrapped(tx)


# equal arguments, equal results: jit's cache and NNX's graphs compare them
@functools.lru_cache(maxsize=128)
def _wrapped(tx):
    if isinstance(tx, optax.MultiSteps):
        tx = optax.GradientTransformationExtraArgs(tx.init, tx.update)
    tx = optax.with_extra_args_support(tx)

    def init(params):
        _refuse_variables(params)
        return _steps.begin(tx.init(_without_state(params)), _trained(params))

    def with_state(name, of_state):
        """Return `tx.update` or `tx.apply` for parameters with state: `of_state(leaf)`
        stands for each leaf of the next state.
        """

        def step(grads, opt_state, params=None, **extra_args):
            if params is None:
                raise ValueError(
                    f"jaxfp8.train.optimizer: {name}: params: expected the parameters "
                    f"with their FP8 state, got None; call {name}(grads, opt_state, "
                    "params)"
                )
            trained = _trained(params)
            before, _ = expect_state(trained, grads)
            if name == "update":
                _warn_of_cast_state(before)
            # 1. Let `tx` see parameters alone, in its arguments as well.
            for argument, value in extra_args.items():
                extra_args[argument] = _argument_without_state(value, trained)
            result, after = getattr(tx, name)(
                _without_state(grads),
                _steps.inner(opt_state),
                _without_state(params),
                **extra_args,
            )
            # 2. Take the next state where `tx` has made a step.
            state, opt_state = _steps.finish(trained, grads, opt_state, after, result)
            if trained is not params:
                state = optax.LookaheadParams(fast=state, slow=state)
            return _with_state(result, state, of_state), opt_state

        return step

    update = with_state("update", NeedsJaxfp8ApplyUpdates)
    if not hasattr(tx, "apply"):
        return optax.GradientTransformationExtraArgs(init, update)
    return AppliedTransformation(init, update, with_state("apply", jnp.asarray))


def _refuse_variables(params) -> None:
    """Refuse NNX variables with the state of a user's own quantizer: Flax gives plain
    arrays to `update`, in which only names tell state from parameters.
    """
    flat = _state_tree.flatten(params)
    nodes = jax.tree.leaves(params, is_leaf=_state_tree.is_variable)
    if flat.unpaired and any(map(_state_tree.is_variable, nodes)):
        raise ValueError(
            "jaxfp8.train.optimizer: init: params: expected no NNX variables with "
            f"state of a CustomRecipe, got {flat.name(flat.unpaired[0])}; take "
            "jaxfp8.nnx.Optimizer(model, tx)"
        )


def _warn_of_cast_state(before: _state_tree.StateTree) -> None:
    """Warn where a cast of the whole tree took the FP8 state along:
    `optax.apply_updates` keeps the dtype of a leaf.
    """
    for i in before.positions():
        dtype = before.leaves[i].dtype
        if dtype != jnp.float32:
            _warnings.warn(
                "jaxfp8.train.optimizer: update: params: expected float32 FP8 state, "
                f"got {before.name(i)} in {dtype}, which optax.apply_updates keeps. "
                "Cast the parameters alone, or take jaxfp8.train.apply_updates, in NNX "
                "jaxfp8.nnx.Optimizer, which make the state float32",
                FP8StateWarning,
            )
            return


def apply_updates(params: Tree, updates: Any) -> Tree:
    """Apply updates as `optax.apply_updates` does, also to Equinox modules: an update
    of None changes nothing.

    Use this function in place of `eqx.apply_updates`, which cannot overwrite state and
    raises.

    Args:
        params: any tree; leaves whose update is None need not be arrays.
        updates: the updates that `optimizer(tx).update` returned, None where `params`
            does not train.

    Returns:
        `params + updates`, in the dtypes of `params`; FP8 state in float32.
    """

    def apply(update, leaf):
        if update is None:
            return leaf
        if isinstance(update, NeedsJaxfp8ApplyUpdates):
            return leaf + update
        return jnp.asarray(leaf + update).astype(jnp.result_type(leaf))

    def is_update(node):
        return node is None or isinstance(node, NeedsJaxfp8ApplyUpdates)

    return jax.tree.map(apply, updates, params, is_leaf=is_update)


# A sum or multiple of pairs `(b, b ^ pattern)` is such a pair only by accident.
_PATTERN = np.uint32(0x5B5B5B5B)


@jax.tree_util.register_pytree_node_class
class NeedsJaxfp8ApplyUpdates:
    """An update that replaces: `leaf + update` is a value, where
    `leaf + (value - leaf)` would round.

    The name of the class is an instruction: JAX's error shows the name where Equinox's
    `apply_updates` meets an update. Zeroed updates, from `MultiSteps` and code that
    skips steps, leave the leaf as it is. Any other arithmetic on an update is found:
    floats change the dtype of the bits; integers make the two arrays of bits differ, so
    that the leaf is -1. Only what takes the node apart can do arithmetic on it, so the
    arrays are made there: a step that applies its updates as they come has no operation
    for them.

    Args:
        value: the value.
    """

    # NumPy arrays leave `array + update` to this class.
    __array_ufunc__ = None

    def __init__(self, value):
        """Make the update that replaces a leaf by `value`, in float32."""
        self.value = jnp.asarray(value, jnp.float32)
        self._bits = None

    def tree_flatten(self):
        """Return the bits of the value as unsigned integers, and the same with a fixed
        pattern flipped.
        """
        if self._bits is not None:
            return self._bits, None
        bits = lax.bitcast_convert_type(self.value, jnp.uint32)
        return (bits, bits ^ _PATTERN), None

    @classmethod
    def tree_unflatten(cls, _, bits) -> "NeedsJaxfp8ApplyUpdates":
        """Make an update of what `tree_flatten` gave, after whatever was done to it."""
        update = object.__new__(cls)
        update._bits = tuple(bits)
        return update

    def __radd__(self, leaf):
        leaf = jnp.asarray(leaf)
        if self._bits is None and self.value.shape == leaf.shape:
            return self.value
        (bits, check), _ = self.tree_flatten()
        if bits.dtype != jnp.uint32 or bits.shape != leaf.shape:
            raise TypeError(
                "jaxfp8.train.optimizer: the update of FP8 state was changed by a "
                "transformation around the optimizer; wrap last: "
                "jaxfp8.train.optimizer(optax.chain(...))"
            )
        # A leaf that a cast of the whole tree made narrow is float32 again.
        value = lax.bitcast_convert_type(bits, jnp.float32)
        # State below zero makes the next step loud, also under jit.
        value = jnp.where(check == bits ^ _PATTERN, value, jnp.float32(-1))
        return jnp.where((bits == 0) & (check == 0), leaf.astype(jnp.float32), value)

    __add__ = __radd__


def _trained(params):
    """Return the parameters of which gradients are taken: the fast ones of
    `optax.lookahead`, else all.
    """
    return params.fast if isinstance(params, optax.LookaheadParams) else params


class NoState(optax.MaskedNode):
    """The place of a leaf of state in the trees that `tx` sees: a node without leaves.

    `(y - (1 - b) * NoState()) / b` is y, so that
    `optax.contrib.schedule_free_eval_params`, which computes this average for all
    leaves, returns state as it is.
    """

    __array_ufunc__ = None

    def __rmul__(self, weight):
        return self

    def __rsub__(self, leaf):
        return _Average(leaf)


@dataclasses.dataclass(frozen=True)
class _Average:
    """`leaf - weight * NoState()`, which a division by any weight makes `leaf`."""

    leaf: jax.Array

    def __truediv__(self, weight):
        return self.leaf


def _without_state(tree) -> Any:
    """Return `tree` with an empty node in the place of each leaf of state, and of its
    NNX variable.

    Flax saves a variable without leaves as None, and would put that None back from a
    checkpoint.
    """
    flat = _state_tree.flatten(tree)
    tree = flat.replace({i: NoState() for i in flat.positions()})

    def without_variable(node):
        return NoState() if _state_tree.is_variable(node) else node

    return jax.tree.map(without_variable, tree, is_leaf=_state_tree.is_variable)


def _with_state(tree, source, function) -> Any:
    """Return `tree` with `function(leaf)`, for each leaf of state in `source`, in the
    empty node of that leaf.
    """

    def filled(node, of_source):
        # A leaf in an NNX variable comes with the variable.
        if isinstance(node, NoState):
            return jax.tree.map(function, of_source)
        return node

    # `tree` has None for leaves of `source` without a gradient, such as functions.
    def is_leaf(node):
        return node is None or isinstance(node, NoState)

    return jax.tree.map(filled, tree, source, is_leaf=is_leaf)


def _argument_without_state(argument, params):
    """Return an extra argument of `update` for `tx`: a tree, or a function of
    parameters, without state.

    A function is called with the parameters from `tx` and the state of `params`,
    through which no gradient goes.
    """
    # Equinox modules are trees and callable
    if not callable(argument) or _state_tree.flatten(argument).positions():
        return _without_state(argument)
    structure = jax.tree.structure(_without_state(params))

    def filled(arg):
        if jax.tree.structure(arg) != structure:
            return arg
        return _with_state(arg, params, lax.stop_gradient)

    def function(*args, **kwargs):
        # `tx` differentiates by parameters alone on purpose, so the warning about that
        # would mislead.
        with warnings.catch_warnings(action="ignore", category=FP8StateWarning):
            return _without_state(argument(*map(filled, args), **kwargs))

    return function
