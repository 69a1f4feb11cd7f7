"""Combine the uses of one state by max: its cotangents form a monoid with max as
addition and 0 as neutral element.
"""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import _compat
from .._jax._batching import repeat_state
from .._jax._trees import Tree, leaves_in
from ..recipes import _reading, _state_tree, shared, without_max
from ._stacked_state import StackedState, unstack_state


def max_grad(tree: Tree) -> Tree:
    """Cast FP8 state so that autodiff combines its cotangents by max, not by sum; for
    the top of a loss function.

    `dot_general` does this by itself for values that a scan, a branch or a
    rematerialized function closes over. The cast at the top also covers state that goes
    through function boundaries as an argument, where autodiff would add what comes
    back: `jax.checkpoint(f)(state, x)`, a jitted function called twice, the carry of a
    scan.

        def loss(variables, batch):
            variables = jaxfp8.max_grad(variables)
            ...

    The state of stacked layers, whose leaves have a leading dimension, is read here,
    once: a loop over the layers runs over a few numbers of each, and their histories
    move after it.

    Leaves that are cast have an internal dtype that only jaxfp8 reads; the gradient
    comes out as plain float32. JAX cannot differentiate all of its own functions in
    such a dtype: take the rows of stacked state with `jnp.unstack` or
    `lax.dynamic_index_in_dim`, because a slice raises.

    Args:
        tree: a variables dict, an `_overwrite_with_gradient` collection, a
            DotGeneralState, or any tree with these inside. Other leaves, and state that
            is not being differentiated, stay as they are.

    Returns:
        `tree`, with the leaves of differentiated state cast, and stacked state as
        `unstack_state` leaves it.
    """

    # 1. Cast all state. A second cast of a leaf gives the same array, so that all its
    #    uses meet there.
    def cast(leaf):
        is_traced = isinstance(leaf, jax.core.Tracer)
        if is_traced and jnp.issubdtype(leaf.dtype, jnp.floating):
            return _compat.to_max(leaf)
        return leaf  # not differentiated, or already cast

    flat = _state_tree.flatten(tree)
    state = {i: cast(flat.leaves[i]) for i in flat.positions()}

    # 2. Read the state of stacked layers: a loop over them needs the readings alone,
    #    and these get its gradients.
    #    The rows of a StackedState are products that are not in a loop.
    in_stacks = leaves_in(tree, StackedState)
    in_loops = {}
    for quantizers in _reading.stacked_products(flat):
        positions = [q.positions for q in quantizers]
        pairs = jax.tree.map(state.get, positions)
        for i in jax.tree.leaves(positions):
            state[i] = jax.lax.stop_gradient(flat.leaves[i])
        place = positions[-1][-1]
        if in_stacks[place] and pairs[0][0].ndim == 2:
            state[place] = _reading.read_rows(pairs)
        else:
            in_loops[place] = pairs
    if in_loops:
        readings = _reading.read(list(in_loops.values()))
        state |= zip(in_loops, readings, strict=True)
    return unstack_state(flat.replace(state))


def apply_with_max_grad(
    apply: Callable[..., Any], variables: Tree, *args: Any, **options: Any
) -> Any:
    """Call the `apply` of a Flax model with state as `max_grad` leaves it."""
    return without_max(apply(max_grad(variables), *args, **options))


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiate as `jax.value_and_grad` does, with right FP8 state in any loop.

    Inside the loss, state is as `max_grad` leaves it. Products that read state through
    `jax.lax.stop_gradient` (a target network, a teacher) record nothing.

    Args:
        loss_fn: returns a scalar, or `(scalar, aux)` with `has_aux`.
        argnums: as JAX's: an int or a tuple of ints, the arguments to differentiate.
        has_aux, allow_int: as JAX's.

    Returns:
        A function of the same arguments that returns `(value, gradients)`. The gradient
        of FP8 state is its next state, in float32. In the backward of a `custom_vjp`
        inside of another such loss, the gradient of state has the dtype of the state,
        as `custom_vjp` wants it: return it, or combine it by `accumulate_gradients`.

    Raises:
        TypeError: when called, `loss_fn` computes with FP8 state outside of products.
    """

    @functools.wraps(loss_fn)
    def value_and_gradients(*args, **kwargs):
        positions = {number % len(args) for number in jax.tree.leaves(argnums)}

        @functools.wraps(loss_fn)
        def loss_with_shared_state(*args, **kwargs):
            args = [max_grad(x) if i in positions else x for i, x in enumerate(args)]
            return without_max(loss_fn(*args, **kwargs))

        with named_errors("value_and_grad"):
            # JAX takes gradients by the dtype of cast state where it takes them by
            # integers.
            is_cast = _compat.holds_max([args[i] for i in positions])
            differentiated = jax.value_and_grad(
                loss_with_shared_state, argnums, has_aux, allow_int=allow_int or is_cast
            )
            return differentiated(*args, **kwargs)

    return value_and_gradients


@contextlib.contextmanager
def named_errors(function: str):
    """Explain errors about the dtype of FP8 state in a loss that `function`
    differentiates, as a TypeError.
    """
    try:
        yield
    except Exception as error:
        # No type tells these errors from others: JAX raises many for a dtype that its
        # arithmetic does not know.
        is_about_cast = str(_compat.MAX_DTYPE) in str(error)
        if is_about_cast and isinstance(error, jax.errors.UnexpectedTracerError):
            raise TypeError(
                f"{function}: loss_fn: expected FP8 state to enter a custom "
                "derivative as its argument, got a function that closes over it; in "
                "flax.linen.custom_vjp pass grad_vars=['params', "
                "'_overwrite_with_gradient'], and the same as vjp_variables of "
                "flax.linen.vjp"
            ) from error
        # Outside of jit its arrays of such a dtype have no methods.
        is_abstract = (
            isinstance(error, NotImplementedError)
            and _raised_in(error) in _compat.METHODS_OF_ARRAYS
        )
        if is_about_cast or is_abstract:
            raise TypeError(
                f"{function}: loss_fn: expected a loss that passes FP8 state to "
                f"products alone, got one that computes with it ({error}); take norms "
                "and decay of the parameters, as in `optax.global_norm(variables["
                "'params'])`, rows of stacked state by jnp.unstack, "
                "jaxfp8.Fp8DotGeneral in layers with Flax's own FP8, and in place of "
                "jax.grad(loss)(variables) "
                "jax.lax.stop_gradient(jaxfp8.grad(loss)(variables)), in a custom_vjp "
                "jaxfp8.grad(loss)(variables)"
            ) from error
        if isinstance(error, AssertionError) and _is_of_equinox(error):
            raise TypeError(
                f"{function}: loss_fn: expected FP8 state outside of Equinox's "
                "checkpointed loops and of diffrax's adjoints, which add up its "
                "gradients; in diffrax pass adjoint=diffrax.DirectAdjoint(), in a "
                "loop of your own kind='bounded'; or carry the state through the loop "
                "with jaxfp8.train.fork and take jax.grad"
            ) from error
        raise


def _raised_in(error) -> str:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "")


def _is_of_equinox(error) -> bool:
    """Tell whether an error arose in Equinox or diffrax, or in a derivative of an
    operation of theirs.
    """
    # A `jit` takes the frames of libraries off the traceback; JAX gives the line of the
    # operation as the cause.
    last = []
    for each in (error, error.__cause__):
        last += traceback.format_tb(getattr(each, "__traceback__", None))[-1:]
    return bool(re.search(r"[\\/](equinox|diffrax)[\\/]", "".join(last)))


def grad(
    loss_fn: Callable[..., Any],
    argnums: Any = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Differentiate as `jax.grad` does, with right FP8 state in any loop; see
    `jaxfp8.value_and_grad`.
    """
    value_and_gradients = value_and_grad(loss_fn, argnums, has_aux, allow_int=allow_int)
    return without_value(value_and_gradients, has_aux)


def without_value(
    value_and_gradients: Callable[..., Any], has_aux: bool
) -> Callable[..., Any]:
    """Return a function that gives the gradients, or `(gradients, aux)`, of one that a
    `value_and_grad` made.
    """

    @functools.wraps(value_and_gradients)
    def gradients_of(*args, **kwargs):
        value, gradients = value_and_gradients(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradients_of


def fork(state: Any) -> Any:
    """Return two handles of one state whose cotangents combine by max; for programs
    that thread state by hand.

        def body(carry, x):
            state, total = carry
            state, used = jaxfp8.train.fork(state)
            return (state, total + f(x, used)), None

    Loops with a backward of their own, such as Equinox's
    `while_loop(kind="checkpointed")`, need `fork`, together with `jax.grad`.

    Args:
        state: a tree of float arrays.

    Returns:
        `(state, state)`.
    """

    # Each handle is a cast of its own, and their cotangents meet before it.
    return jax.tree.map(_handle, state), jax.tree.map(_handle, state)


def _handle(leaf):
    return leaf if _compat.is_max(leaf) else shared(leaf).astype(leaf.dtype)


def spread(state: Any, count: int) -> Any:
    """Return a copy of `state` for each device of a `shard_map` whose gradient is taken
    outside of it.

        copies = jaxfp8.train.spread(state, mesh.size)
        # in_specs of the copies: PartitionSpec(mesh.axis_names); inside of the map:
        state = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), copies)

    With `check_vma=False` JAX adds up what the devices return for an argument that they
    share. Each copy gets its own cotangent, and those of all copies combine by max:

        copies[i] = state,   cotangent of state = max_i(cotangent of copies[i])

    Place the copies by `jax.sharding.reshard` on a mesh of Explicit axes.

    Args:
        state: a tree of float arrays: a DotGeneralState, a collection, or what
            `max_grad` made of one.
        count: the number of devices along the manual axes of the `shard_map`, without
            axes along which the state itself is cut.

    Returns:
        `state`, with a leading dimension of size `count` in each leaf; other leaves
        than those of `max_grad` are float32.
    """

    def copies(leaf):
        leaf = leaf if _compat.is_max(leaf) else shared(leaf)
        return repeat_state((count, None), leaf)

    return jax.tree.map(copies, state)
