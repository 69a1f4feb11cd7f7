"""average: an average of models over steps, whose FP8 state is that of the newest
one.
"""

import numbers

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .._jax._trees import Tree
from ..ops import _checks
from ._steps import combine


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
        TypeError: `decay` is not an array.
    """
    # The host does not wait for the value of an array.
    if isinstance(decay, numbers.Real) and not 0 <= decay <= 1:
        raise ValueError(
            f"train.average: decay: expected a number from 0 to 1, got {decay!r}"
        )
    decay = _checks.array("train.average", "decay", decay)
    _checks.shape("train.average", "decay", decay, ())
    return combine(
        (old, new),
        lambda old, new: new,
        lambda old, new: _average(old, new, decay),
        "train.average: new: expected the structure of old, got a tree that differs at "
        "{}; begin with a copy of the trained variables",
    )


def _average(old, new, decay):
    dtype = jnp.result_type(old)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return new
    wide = np.promote_types(dtype, np.float32)  # jnp's raises where promotion is strict
    decay, old, new = (jnp.asarray(x).astype(wide) for x in (decay, old, new))
    return (decay * old + (1 - decay) * new).astype(dtype)
