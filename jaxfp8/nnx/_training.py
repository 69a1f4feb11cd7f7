"""Training NNX models: gradients in which shared state combines by max, and steps that
store or drop the next state.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from .._jax import _compat, _warnings
from ..mixed_precision import select
from ..recipes import (
    OVERWRITE_WITH_GRADIENT,
    FP8StateWarning,
    _state_tree,
    without_max,
)
from ..train import (
    _steps,
    expect_state,
    max_grad as _max_grad,
    named_errors,
    update_state as _update_state,
    without_value,
)
from ._dot_general import OverwriteWithGradient, paths_in, trainable


def value_and_grad(
    f: Callable[..., Any], *, argnums: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Differentiate as `nnx.value_and_grad`, by parameters and FP8 state; shared state
    combines by max.

        loss, grads = jaxfp8.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)  # a jaxfp8.nnx.Optimizer

    Args:
        f: a function of NNX modules, states and arrays that returns a loss f32[], or
            `(loss, aux)`.
        argnums: the arguments to differentiate: an int, or a tuple, of which an int
            stands for the parameters and the FP8 state of a module; or
            `nnx.DiffState(argnum, filter)`, whose filter should include
            `OverwriteWithGradient`.
        has_aux: whether `f` returns `(loss, aux)`.

    Returns:
        A function of f's arguments that returns the value and the gradients, as
        `nnx.value_and_grad` does. The gradient of an `OverwriteWithGradient` variable
        is its next value.

    Raises:
        TypeError: when called, `f` computes with FP8 state outside of products.
    """
    argnums, f = _with_state(argnums), _with_max_grad(f)

    @functools.wraps(f)
    def watched(*args, **kwargs):
        variables = _variables(args, OverwriteWithGradient)
        # JAX takes gradients by the dtype of cast state where it takes them by
        # integers.
        is_cast = _compat.holds_max([v.get_value() for v in variables])
        differentiate = nnx.value_and_grad(
            f, argnums=argnums, has_aux=has_aux, allow_int=is_cast
        )
        with named_errors("nnx.value_and_grad"):
            value, gradients = differentiate(*args, **kwargs)
        if nnx.set_graph_mode.current_value():
            _watch(args, gradients)
        return value, gradients

    return watched


def grad(
    f: Callable[..., Any], *, argnums: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Differentiate as `value_and_grad` does, and return the gradients without the
    value.
    """
    differentiate = value_and_grad(f, argnums=argnums, has_aux=has_aux)
    return without_value(differentiate, has_aux)


def _watch(tree, gradients) -> None:
    """Warn when `gradients` die, if the parameters of `tree` have changed by then and
    its FP8 state has not.

    No hook sees that `nnx.Optimizer(wrt=nnx.Param)` leaves state out, and
    `update_state` may come before or after the optimizer: only the end of the
    gradients' life shows that their state was not stored. Objects live and die alike
    while a step is traced.

    Args:
        tree: the arguments of the loss, as `nnx.iter_graph` takes them.
        gradients: the gradients with respect to some of them.
    """
    state = [(v, v.get_raw_value()) for v in _variables(tree, OverwriteWithGradient)]
    # Keep the id of an old parameter only: the array must be free to die.
    params = [(v, id(v.get_raw_value())) for v in _variables(tree, nnx.Param)]

    def check_stored():
        is_used = any(id(v.get_raw_value()) != before for v, before in params)
        if is_used and all(v.get_raw_value() is before for v, before in state):
            _warnings.warn(
                "the parameters were updated with these gradients, and the next FP8 "
                "state in them was not stored: scales stay what they are. Take "
                "jaxfp8.nnx.Optimizer in place of nnx.Optimizer, or call "
                "jaxfp8.nnx.update_state(model, gradients) beside it",
                FP8StateWarning,
                line,
            )

    # Flax's optimizer takes the parameters out of this very object, so that its death
    # is the end of the step. The finalizer belongs to the object: it is gone as soon as
    # it has run.
    for gradient in jax.tree.leaves(gradients, is_leaf=_is_state):
        if _is_state(gradient) and nnx.state(gradient, OverwriteWithGradient):
            line = _warnings.user_line()
            watch = weakref.finalize(gradient, check_stored)
            watch.atexit = False
            return


def _is_state(leaf) -> bool:
    return isinstance(leaf, nnx.State)


@contextlib.contextmanager
def max_grad(*tree):
    """Enter a context in which all uses of the FP8 state in `tree` combine by max; for
    the top of a loss.

    `value_and_grad` and `grad` of this module enter the context by themselves. Other
    gradients need it for state that enters an inner `nnx.remat`, `nnx.jit`, `nnx.cond`
    or `nnx.scan` with its module and is used again outside or in another call: JAX
    would add up the cotangents of the calls. A layer that is called twice without these
    transforms does not need it.

        def loss_fn(model, x):
            with jaxfp8.nnx.max_grad(model):
                return jnp.mean(model(x) ** 2)

    Args:
        *tree: modules, or pytrees that hold modules. On leaving the context their state
            is the plain f32 state from before.
    """
    state = nnx.as_pure(nnx.state(tree, OverwriteWithGradient))
    cast = _max_grad({OVERWRITE_WITH_GRADIENT: state})
    nnx.update(tree, cast[OVERWRITE_WITH_GRADIENT])
    try:
        with paths_in(tree):
            yield
    finally:
        nnx.update(tree, state)
        # the loss may have logged a scale
        for variable in _variables(tree, nnx.Variable):
            if _compat.holds_max(variable.get_value()):
                variable.set_value(without_max(variable.get_value()))


def _variables(tree, kind):
    return (node for _, node in nnx.iter_graph(tree) if isinstance(node, kind))


def _with_max_grad(f):
    if isinstance(getattr(f, "__self__", None), nnx.Module):
        # NNX refuses a bound method with a message; wrapped, the module of the method
        # would be a constant
        return f

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        with max_grad(*args, *kwargs.values()):
            out = f(*args, **kwargs)
        # The result may hold state. Only then is the tree made anew: maps exchange NNX
        # objects for copies.
        return without_max(out) if _compat.holds_max(out) else out

    return wrapped


def _with_state(argnums):
    """Replace ints in `argnums`, which mean parameters in NNX, by filters of parameters
    and FP8 state.
    """
    if not (
        nnx.set_graph_mode.current_value() and nnx.set_graph_updates.current_value()
    ):
        # in tree mode modules are pytrees, of which all leaves are differentiated
        return argnums
    if isinstance(argnums, nnx.DiffState):
        return argnums
    if isinstance(argnums, int):
        return nnx.DiffState(argnums, trainable)
    return tuple(map(_with_state, argnums))


def update_state(model: Any, grads: Any) -> None:
    """Store the next FP8 state in the model, as `jaxfp8.update_state` does for trees of
    arrays.

    State that was not used in this step, or whose gradient is not finite, stays as it
    is. Parameters are left alone, so call this function beside any optimizer:
    `nnx.Optimizer(model, tx, wrt=nnx.Param).update(model, grads)`.

    Args:
        model: an NNX module; changed in place.
        grads: the gradients that `value_and_grad` returned for `model`.

    Raises:
        ValueError: `grads` holds no state, or state that was summed, averaged, clipped
            or unscaled; see `jaxfp8.update_state`.
    """
    old, new = (nnx.state(tree, OverwriteWithGradient) for tree in (model, grads))
    nnx.update(model, _update_state(old, new))


@contextlib.contextmanager
def step_if(finite, *tree):
    """Undo the step in the `with` block unless `finite`: parameters, optimizer state
    and FP8 state keep their values.

        finite = jaxfp8.mixed_precision.all_finite(grads)
        with jaxfp8.nnx.step_if(finite, model, optimizer):
            optimizer.update(model, grads)

    To do the same by hand, apply `mixed_precision.select` to
    `nnx.as_pure(nnx.state(...))` from before and after the step; `nnx.state` alone is
    no copy, so a step changes it.

    Args:
        finite: bool[]; whether to keep the step.
        *tree: all modules and optimizers that the step changes.
    """
    variables = list(_variables(tree, nnx.Variable))
    before = [variable.get_value() for variable in variables]
    yield
    for variable, old in zip(variables, before, strict=True):
        new = variable.get_value()
        if new is not old:
            variable.set_value(select(finite, new, old))


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` that also stores the next FP8 state; the transformation sees
    parameters only.

        optimizer = jaxfp8.nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    `tx` and `opt_state` are those of Flax's optimizer of the parameters, so that
    `opt_state` stays valid when the model's recipe changes. Steps that `tx` skips or
    accumulates do so to FP8 state too, as in `jaxfp8.train.optimizer`. `update` needs
    the gradients of parameters and state that `jaxfp8.nnx.value_and_grad` returns.

    Args:
        model, tx, wrt, graph: as in `nnx.Optimizer`; the filter `wrt` chooses the
            parameters that train.

    Attributes:
        mini_steps: with `optax.MultiSteps` in `tx`, the max of each state over the
            mini-steps so far, by its path.
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        graph: bool | None = None,
    ):
        # A filter such as `trainable` may include the state.
        super().__init__(
            model, tx, wrt=nnx.All(wrt, nnx.Not(OverwriteWithGradient)), graph=graph
        )
        self.mini_steps = nnx.data({})
        state = nnx.state(model, OverwriteWithGradient, graph=graph)
        self._keep_mini_steps(_steps.begin(nnx.as_pure(self.opt_state), state), state)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> optax.Updates | None:
        """Update as `nnx.Optimizer.update` does; FP8 state is float32 then, whatever
        cast the model went through.

        Returns:
            The updates of the parameters; None where `tx` writes the next parameters
            itself, as `jaxfp8.optim.adamw` does without arguments by name.
            `optax.chain(tx)` gives updates.

        Raises:
            ValueError: `grads` hold no state, or state that was summed, averaged,
                clipped or unscaled; see `jaxfp8.update_state`.
        """
        # 1. Let `tx` see parameters alone.
        kwargs = {name: self._of_parameters(x) for name, x in kwargs.items()}
        (old, params), (new, gradients) = (
            nnx.state(tree, OverwriteWithGradient, self.wrt, graph=self.graph)
            for tree in (model, grads)
        )
        expect_state(old, new)
        params, gradients, opt_state, extra = map(
            nnx.as_pure, (params, gradients, self.opt_state, kwargs)
        )
        # 2. Take the next state where `tx` has made a step.
        before = self._with_mini_steps(opt_state, old)
        updates, params, state, kept = _steps.step(
            self.tx, gradients, before, params, old, new, **extra
        )
        nnx.update(model, state)
        self._keep_mini_steps(kept, old)
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(_steps.inner(kept), graph=self.graph))
        self.step[...] += 1
        return updates

    def _of_parameters(self, argument):
        """Return an argument for `tx` as Flax's optimizer gets it: a tree, or a
        function of parameters.
        """
        if not callable(argument):
            return nnx.state(argument, self.wrt) if _is_state(argument) else argument

        def function(*args, **kwargs):
            # `tx` differentiates by parameters alone on purpose, so the warning about
            # that would mislead.
            with warnings.catch_warnings(action="ignore", category=FP8StateWarning):
                return argument(*args, **kwargs)

        return function

    def _with_mini_steps(self, opt_state, state):
        """Return `opt_state` with the state of the mini-steps so far; zeros where
        `state` is of another recipe.
        """
        kept = []
        for path in _paths(state):
            if path in self.mini_steps:
                kept.append(self.mini_steps[path].get_value())
        return _steps.begin(_steps.Accumulating(opt_state, tuple(kept)), state)

    def _keep_mini_steps(self, opt_state, state):
        if isinstance(opt_state, _steps.Accumulating):
            kept = {}
            for path, value in zip(_paths(state), opt_state.state, strict=True):
                kept[path] = self.mini_steps.get(path, nnx.OptState(value))
                kept[path].set_value(value)
            self.mini_steps = nnx.data(kept)


def _paths(state) -> list[str]:
    """Return the names of all leaves of state."""
    flat = _state_tree.flatten(state)
    return [flat.name(i) for i in flat.positions()]
