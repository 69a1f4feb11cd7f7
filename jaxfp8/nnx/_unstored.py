"""A warning for gradients of which only the parameters were used and the FP8 state was dropped, as in nnx.Optimizer."""

import functools
import weakref

import jax
from flax import nnx

from .._jax import _warnings
from ..recipes import FP8StateWarning
from ._variables import OverwriteWithGradient


def watch(tree, gradients) -> None:
    """Warn when `gradients` die, if the parameters of `tree` have changed by then and its FP8 state has not.

    No hook sees that `nnx.Optimizer(wrt=nnx.Param)` leaves state out, and `update_state` may come before or after the
    optimizer: only the end of the gradients' life shows that their state was not stored. Objects live and die alike
    while a step is traced.

    Args:
        tree: the arguments that were differentiated, as `nnx.iter_graph` takes them.
        gradients: the gradients with respect to `tree`.
    """
    variables = [node for _, node in nnx.iter_graph(tree) if isinstance(node, nnx.Variable)]
    state = [(v, v.get_raw_value()) for v in variables if isinstance(v, OverwriteWithGradient)]
    # Keep the id of an old parameter only: the array must be free to die.
    params = [(v, id(v.get_raw_value())) for v in variables if isinstance(v, nnx.Param)]
    # Flax's optimizer takes the parameters out of this very object, so that its death is the end of the step.
    # The finalizer belongs to the object: it is gone as soon as it has run.
    for gradient in jax.tree.leaves(gradients, is_leaf=lambda leaf: isinstance(leaf, nnx.State)):
        if state and isinstance(gradient, nnx.State) and jax.tree.leaves(nnx.state(gradient, OverwriteWithGradient)):
            weakref.finalize(gradient, _check, params, state, _warnings.user_line()).atexit = False
            return


def _check(params, state, line) -> None:
    is_used = any(id(variable.get_raw_value()) != before for variable, before in params)
    if is_used and all(variable.get_raw_value() is before for variable, before in state):
        _warnings.warn(
            "the parameters were updated with these gradients, and the next FP8 state in them was not stored: scales "
            "stay what they are. Take jaxfp8.nnx.Optimizer in place of nnx.Optimizer, or call "
            "jaxfp8.nnx.update_state(model, gradients) beside it",
            FP8StateWarning,
            line,
        )


def watching(differentiate, argnums, gradients_of):
    """Return `differentiate` with a watch on its gradients, which `gradients_of` takes out of its result."""
    positions = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    positions = [getattr(position, "argnum", position) for position in positions]

    @functools.wraps(differentiate)
    def watched(*args, **kwargs):
        out = differentiate(*args, **kwargs)
        if nnx.set_graph_mode.current_value():
            watch([args[i] for i in positions], gradients_of(out))
        return out

    return watched
