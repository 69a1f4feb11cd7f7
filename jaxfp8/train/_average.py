"""average: an average of models over steps, whose FP8 state is that of the newest
one.
"""

import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._jax._trees import Tree
from ..recipes import _state_tree


def average(old: Tree, new: Tree, decay: ArrayLike) -> Tree:
    """Average a model over steps: `decay * old + (1 - decay) * new`, with the FP8 state
    of `new`.

        ema = jaxfp8.train.average(ema, train.params, 0.999)
        nnx.update(ema, jaxfp8.train.average(nnx.state(ema), nnx.state(model), 0.999))

    An average of amaxes and scales is none of any step: after a spike it saturates for
    thousands of steps, and no product can tell. The parameters of an average are close
    to the newest ones, and so are their scales.

    Args:
        old: the average so far: variables, an NNX state, any tree that mixes parameters
            with FP8 state.
        new: the same tree after a step.
        decay: a number, or scalar array, from 0 to 1.

    Returns:
        The average, in the structure and dtypes of `old`, computed in float32 at least.
        FP8 state, integers and bools are those of `new`.

    Raises:
        ValueError: the trees differ in structure; `decay` has a shape, or is a number
            outside of 0 to 1.
        TypeError: `decay` is not a number.
    """
    _check_decay(decay)
    before, after = _state_tree.flatten(old), _state_tree.flatten(new)
    if before.paths != after.paths:
        odd = sorted({"/".join(path) for path in set(before.paths) ^ set(after.paths)})
        raise ValueError(
            "train.average: new: expected the structure of old, got a tree that "
            f"differs at {odd[:3]}; begin with a copy of the trained variables"
        )
    state = set(after.positions())
    pairs = enumerate(zip(before.leaves, after.leaves, strict=True))
    return before.replace(
        {i: y if i in state else _average(x, y, decay) for i, (x, y) in pairs}
    )


def _check_decay(decay):
    is_array = not isinstance(decay, numbers.Real)
    if is_array and not jnp.issubdtype(getattr(decay, "dtype", bool), np.number):
        raise TypeError(
            f"train.average: decay: expected a number from 0 to 1, got {decay!r}"
        )
    # The host does not wait for the value of an array.
    if np.shape(decay) or not (is_array or 0 <= decay <= 1):
        got = f"shape {np.shape(decay)}" if np.shape(decay) else repr(decay)
        raise ValueError(
            f"train.average: decay: expected one number from 0 to 1, got {got}"
        )


def _average(old, new, decay):
    dtype = jnp.result_type(old)
    if not (
        jnp.issubdtype(dtype, jnp.inexact)
        and not jnp.issubdtype(dtype, jax.dtypes.extended)
    ):
        return new
    wide = np.promote_types(dtype, np.float32)  # jnp's raises where promotion is strict
    decay = jnp.asarray(decay).astype(wide)
    old, new = (jnp.asarray(x).astype(wide) for x in (old, new))
    return (decay * old + (1 - decay) * new).astype(dtype)
