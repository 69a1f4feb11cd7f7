"""The state of an optimizer with its moments in FP8: convert it from and to float32, and check its classes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ..numerics import E4M3
from ._blocks import amax_shape
from ._moments import Moment, SignedMoment, SquaredMoment, decode, encode

Table = Mapping[type, Mapping[str, type[Moment]]]

# The moments that optax keeps. ScaleByRStdDevState is not here: a variance is a difference of moments, which rounding
# can make negative.
MOMENTS: Table = {
    optax.ScaleByAdamState: {"mu": SignedMoment, "nu": SquaredMoment},
    optax.ScaleByAmsgradState: {"mu": SignedMoment, "nu": SquaredMoment, "nu_max": SquaredMoment},
    optax.ScaleByBeliefState: {"mu": SignedMoment, "nu": SquaredMoment},
    optax.ScaleByLionState: {"mu": SignedMoment},
    optax.ScaleByNovogradState: {"mu": SignedMoment},
    optax.ScaleByRmsState: {"nu": SquaredMoment},
    # The class of this state has no public name. `eval_shape` computes nothing: an import must start no backend of JAX.
    type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())): {"nu": SquaredMoment},
    optax.ScaleByRssState: {"sum_of_squares": SquaredMoment},
    optax.TraceState: {"trace": SignedMoment},
}


class QuantizedState(NamedTuple):
    """The state of `quantized(tx)`.

    Attributes:
        count: i32[], the number of updates so far, on which the random bits of the next update depend.
        inner: the state of `tx`, with a Moment in the place of each large moment.
    """

    count: jax.Array
    inner: Any


def quantize_state(opt_state: Any, *, min_size: int = 4096, moments: Table | None = None) -> QuantizedState:
    """Convert the float32 state of an optax transformation `tx` to the state of `quantized(tx)`.

    Args:
        opt_state: the state of `tx`.
        min_size: the `min_size` of `quantized`.
        moments: the `moments` of `quantized`.

    Returns:
        The state of `quantized(tx)`, with a count of 0. All of its moments are rounded to nearest.

    Raises:
        ValueError: no part of the state is of a class whose moments are known, or a moment is in FP8 already.
    """
    table = MOMENTS | dict(moments or {})
    if any(map(is_moment, leaves(opt_state))):
        raise ValueError("jaxfp8.optim: tx: expected moments in float32, got some in FP8 already; apply quantized once")
    if not any(type(node) in table for node in jax.tree.leaves(opt_state, is_leaf=lambda node: type(node) in table)):
        raise ValueError(
            "jaxfp8.optim: tx: expected a transformation that keeps moments, such as optax.adamw, got one whose state "
            f"is {jax.tree.structure(opt_state)}; pass the moments of a state of your own: "
            "quantized(tx, moments={MyState: {'momentum': jaxfp8.optim.SignedMoment}})"
        )

    def quantize(kind, leaf):
        arrays = jax.tree.leaves(leaf)  # none in a Variable that `optax.masked` left out
        if not (arrays and is_large(*arrays, min_size)):
            return leaf
        # Moments of `init` are constants, whose codes XLA would compute, slowly, while it compiles.
        moment = encode(kind, lax.optimization_barrier(*arrays))
        # Box each array in a Variable of its own: `nnx.Optimizer` would take apart a moment in a single Variable.
        return kind(*(jax.tree.map(lambda _, part=part: part, leaf) for part in moment))

    return QuantizedState(jnp.zeros((), jnp.int32), map_moments(quantize, opt_state, table))


def dequantize_state(opt_state: Any) -> Any:
    """Convert the state of `quantized(tx)` to the float32 state of `tx`.

    Args:
        opt_state: a QuantizedState, or a tree with QuantizedStates inside, such as the state of a chain.

    Returns:
        The tree, with the state of `tx` in the place of each QuantizedState.
    """

    # A QuantizedState holds no other QuantizedState: `quantized` refuses moments in FP8.
    def dequantize(node):
        return dequantize_moments(node.inner) if isinstance(node, QuantizedState) else node

    return jax.tree.map(dequantize, opt_state, is_leaf=lambda node: isinstance(node, QuantizedState))


def dequantize_moments(tree: Any) -> Any:
    """Decode the moments in FP8 of a tree."""
    return jax.tree.map(lambda x: decode(x) if is_moment(x) else x, tree, is_leaf=is_moment)


def map_moments(function, tree, table: Table) -> Any:
    """Apply `function(kind, leaf)` to the leaves of the fields that the table names; a Moment is one leaf."""

    def map_fields(node):
        fields = table.get(type(node), {})
        mapped = {
            name: jax.tree.map(lambda leaf, kind=kind: function(kind, leaf), getattr(node, name), is_leaf=_is_leaf)
            for name, kind in fields.items()
        }
        return node._replace(**mapped) if mapped else node

    return jax.tree.map(map_fields, tree, is_leaf=lambda node: type(node) in table or is_moment(node))


def check(state: Any, table: Table, min_size: int) -> None:
    """Raise a ValueError unless `state` is that of `quantized` with this table and `min_size`.

    A state that was restored from the checkpoint of another transformation fails here.
    """
    if not isinstance(state, QuantizedState):
        raise ValueError(
            f"jaxfp8.optim.quantized: update: state: expected a QuantizedState, got {type(state).__name__}; restore a "
            "checkpoint into what init returns, and convert a float32 state by jaxfp8.optim.quantize_state"
        )

    def check_leaf(kind, leaf):
        if is_moment(leaf):
            is_right = type(leaf) is kind and leaf.data.dtype == E4M3.dtype and leaf.amax.shape == leaf.exponent.shape
            if is_right and leaf.amax.shape == amax_shape(leaf.data.shape):
                return leaf
        elif not is_large(leaf, min_size):
            return leaf
        raise ValueError(
            f"jaxfp8.optim.quantized: update: state: expected a {kind.__name__} of float8_e4m3fn codes with an amax "
            f"and an exponent for each block, got shapes {jax.tree.map(jnp.shape, leaf)} in "
            f"{jax.tree.map(jnp.result_type, leaf)}; restore the checkpoint with the min_size and the moments that "
            "it was made with, or convert it by jaxfp8.optim.dequantize_state and quantize_state"
        )

    map_moments(check_leaf, state.inner, table)


def leaves(tree: Any) -> list:
    """Return the leaves of a tree; a Moment is one leaf."""
    return jax.tree.leaves(tree, is_leaf=is_moment)


def is_moment(node: Any) -> bool:
    return isinstance(node, Moment)


def _is_leaf(node):
    return is_moment(node) or hasattr(node, "get_raw_value")  # a Variable of Flax NNX


def is_large(x: Any, min_size: int) -> bool:
    """Return whether a leaf is an array of floats with `min_size` elements or more."""
    return jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating) and x.ndim > 0 and x.size >= min_size
