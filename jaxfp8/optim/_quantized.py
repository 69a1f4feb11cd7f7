"""quantized: wraps an optax transformation to keep its moments in FP8; its state, and
conversions of that state.

Random bits are made by counting: a function of the seed, the step, the leaf and the
element, on every mesh.
"""

import functools
import itertools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._jax import _warnings
from .._jax._trees import leaves_in
from ..numerics import E4M3, _moment_codec
from ..recipes import _state_tree
from ._moments import (
    Moment,
    SignedMoment,
    SquaredMoment,
    amax_shape,
    block_axis,
    decode,
    encode,
    encode_changes,
)

Table = Mapping[type, Mapping[str, type[Moment]]]

# The moments that optax keeps. ScaleByRStdDevState is not here: a variance is a
# difference of moments, which rounding can make negative. Of AMSGrad, neither `nu` nor
# its maximum is: the maximum of what is rounded at random climbs.
MOMENTS: Table = {
    optax.ScaleByAdamState: {"mu": SignedMoment, "nu": SquaredMoment},
    optax.ScaleByAmsgradState: {"mu": SignedMoment},
    optax.ScaleByBeliefState: {"mu": SignedMoment, "nu": SquaredMoment},
    optax.ScaleByLionState: {"mu": SignedMoment},
    optax.ScaleByNovogradState: {"mu": SignedMoment},
    optax.ScaleByRmsState: {"nu": SquaredMoment},
    # The class of this state has no public name. `eval_shape` computes nothing: an
    # import must start no backend of JAX.
    type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ())): {
        "nu": SquaredMoment
    },
    optax.ScaleByRssState: {"sum_of_squares": SquaredMoment},
    optax.TraceState: {"trace": SignedMoment},
}


class QuantizedState(NamedTuple):
    """The state of `quantized(tx)`.

    Attributes:
        update_count: i32[], the number of updates so far, on which the random bits of
            the next update depend.
        inner: the state of `tx`, with a Moment in the place of each large moment.
    """

    update_count: jax.Array
    inner: Any


def quantized(
    tx: optax.GradientTransformation,
    *,
    min_size: int = 4096,
    moments: Table | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Keep the moments of `tx` in FP8: 2.1 bytes a parameter for Adam's, which take 8
    in float32.

        tx = jaxfp8.optim.quantized(optax.adamw(1e-3))
        opt_state = tx.init(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    `tx` sees its moments in the dtypes that its `init` gives them. After the update
    each block of 128 elements is quantized with an amax of its own; a block that the
    update did not change keeps its bits. The rest of the state, and moments of less
    than `min_size` elements, stay as they are. A warning of `init` names large leaves
    that stay.

    Blocks lie along the last axis with at least 64 elements, or else along the largest
    axis. Random bits are the same on every mesh, and for all members of an ensemble
    under `jax.vmap`. Inside of `jax.shard_map` each shard has blocks of its own.

    The updates have a derivative by the gradients, that of `tx`, in reverse mode. The
    state has none: a gradient through it, as that of a loss after two steps, raises a
    TypeError.

    Args:
        tx: an optax transformation, such as a chain. Other transformations
            (`optax.masked`, `optax.multi_transform`, `jaxfp8.train.optimizer`) may wrap
            the result, or be part of `tx`.
        min_size: the number of elements from which on a moment is quantized.
        moments: the moments in states of your own, besides those of optax: for each
            NamedTuple class a dict from its fields to `SignedMoment` or
            `SquaredMoment`: `{MyState: {"momentum": jaxfp8.optim.SignedMoment}}`.
        seed: an int, modulo 2**32 the seed of the random bits that round moments.

    Returns:
        The transformation; its state is a `QuantizedState`.

    Raises:
        TypeError: `seed` is no int.
        ValueError: in `init`, `tx` has no state whose moments are known, or already has
            moments in FP8; in `update`, the state is not that of this transformation.
    """
    table = MOMENTS | dict(moments or {})
    tx = optax.with_extra_args_support(tx)
    seed = operator.index(seed) % 2**32

    def init(params):
        refuse_state("optim.quantized", params)
        return quantize_state(tx.init(params), min_size=min_size, moments=moments)

    def update(grads, state, params=None, **extra_args):
        # 1. Update with the moments that the transformation would have: `init` tells
        #    their dtypes.
        check("optim.quantized: update", state, table, min_size)
        like = jax.eval_shape(tx.init, grads if params is None else params)

        def decode_like(x, like):
            return decode(x).astype(like.dtype) if is_moment(x) else x

        before = jax.tree.map(decode_like, state.inner, like, is_leaf=is_moment)
        updates, after = tx.update(grads, before, params, **extra_args)

        # 2. Quantize the moments that have changed. Each leaf has a number, and with it
        #    random bits of its own.
        numbers = itertools.count()

        def requantize(old, new):
            number = np.uint32(next(numbers))
            if not is_moment(old):
                return new
            keys = block_keys(seed, state.update_count, number, new.shape)
            return encode_changes(old, new, keys)

        inner = jax.tree.map(requantize, state.inner, after, is_leaf=is_moment)
        return updates, QuantizedState(optax.safe_increment(state.update_count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def refuse_state(where, params):
    """Raise for FP8 state among the parameters: the optimizer would step on it."""
    flat = _state_tree.flatten(params)
    if positions := flat.positions():
        raise ValueError(
            f"{where}: init: params: expected parameters alone, got FP8 state among "
            f"them, {flat.name(positions[0])}; an optimizer must not step on it: wrap "
            "this one, jaxfp8.train.optimizer(tx), or take jaxfp8.linen.TrainState or "
            "jaxfp8.nnx.Optimizer"
        )


def block_keys(seed, step, leaf, shape):
    """Return a key for each block of a moment, u32 in the shape of its amaxes, from
    which the random bits of the block in one update are made.

        keys = mix(mix(mix(mix(seed) ^ step) ^ leaf) ^ block)

    Blocks are numbered in the row-major order of their amaxes, modulo 2**32.

    Args:
        seed: the seed of the transformation.
        step: i32 [], the number of updates before this one.
        leaf: u32 [], the number of the moment among the leaves of the optimizer's
            state.
        shape: the shape of the moment.
    """
    mix, sizes = _moment_codec.mix, amax_shape(shape)
    key = mix(mix(mix(jnp.uint32(seed)) ^ step.astype(jnp.uint32)) ^ leaf)
    block = jnp.zeros(sizes, jnp.uint32)
    for i, size in enumerate(sizes):
        block = block * np.uint32(size) + lax.broadcasted_iota(jnp.uint32, sizes, i)
    return mix(key ^ block)


def quantize_state(
    opt_state: Any, *, min_size: int = 4096, moments: Table | None = None
) -> QuantizedState:
    """Convert the float32 state of an optax transformation `tx` to the state of
    `quantized(tx)`.

    Args:
        opt_state: the state of `tx`.
        min_size: the `min_size` of `quantized`.
        moments: the `moments` of `quantized`.

    Returns:
        The state of `quantized(tx)`, with a count of 0. All of its moments are rounded
        to nearest.

    Raises:
        ValueError: no part of the state is of a class whose moments are known, or a
            moment is in FP8 already.
    """
    table = MOMENTS | dict(moments or {})
    if any(leaves_in(opt_state, Moment)):
        raise ValueError(
            "jaxfp8.optim: tx: expected moments in float32, got some in FP8 already; "
            "apply quantized once"
        )

    def has_moments(node):
        return type(node) in table

    if not any(map(has_moments, jax.tree.leaves(opt_state, is_leaf=has_moments))):
        raise ValueError(
            "jaxfp8.optim: tx: expected a transformation that keeps moments, such as "
            f"optax.adamw, got one whose state is {jax.tree.structure(opt_state)}; "
            "pass the moments of a state of your own: quantized(tx, moments={MyState: "
            "{'momentum': jaxfp8.optim.SignedMoment}})"
        )

    def quantize(kind, leaf):
        # none in a Variable that `optax.masked` left out
        arrays = jax.tree.leaves(leaf)
        if not (arrays and is_large(*arrays, min_size)):
            return leaf
        # Moments of `init` are constants, whose codes XLA would compute, slowly, while
        # it compiles.
        moment = encode(kind, lax.optimization_barrier(*arrays))
        # Box each array in a Variable of its own: `nnx.Optimizer` would take apart a
        # moment in a single Variable.
        structure = jax.tree.structure(leaf)
        data, *of_blocks = (structure.unflatten([part]) for part in moment)
        if _is_variable(leaf):
            for variable in of_blocks:
                _keep_whole(variable, block_axis(arrays[0].shape))
        return kind(data, *of_blocks)

    inner = map_moments(quantize, opt_state, table)
    stay = [
        f"{jax.tree_util.keystr(path)} ({leaf.dtype})"
        for path, leaf in jax.tree_util.tree_leaves_with_path(inner, is_leaf=is_moment)
        if not is_moment(leaf) and is_large(leaf, min_size)
    ]
    if stay:
        _warnings.warn(
            "jaxfp8.optim: these leaves of the optimizer's state are large and stay "
            f"as they are: {', '.join(stay)}; name moments among them by "
            "quantized(tx, moments=...), or filter this warning",
            UserWarning,
        )
    return QuantizedState(jnp.zeros((), jnp.int32), inner)


def dequantize_state(opt_state: Any) -> Any:
    """Convert the state of `quantized(tx)` to the float32 state of `tx`.

    Args:
        opt_state: a QuantizedState, or a tree with QuantizedStates inside, such as the
            state of a chain.

    Returns:
        The tree, with the state of `tx` in the place of each QuantizedState. Its
        moments are float32.
    """

    def dequantize(node):
        if isinstance(node, QuantizedState):
            return dequantize_state(node.inner)
        return decode(node) if is_moment(node) else node

    def is_leaf(node):
        return isinstance(node, QuantizedState | Moment)

    return jax.tree.map(dequantize, opt_state, is_leaf=is_leaf)


def map_moments(function, tree, table):
    """Apply `function(kind, leaf)` to the leaves of the fields that the table names; a
    Moment is one leaf.
    """

    def has_moments(node):
        return type(node) in table

    def map_fields(node):
        for name, kind in table.get(type(node), {}).items():
            of_kind = functools.partial(function, kind)
            field = jax.tree.map(of_kind, getattr(node, name), is_leaf=_is_leaf)
            node = node._replace(**{name: field})
        return node

    return jax.tree.map(map_fields, tree, is_leaf=has_moments)


def check(function, state, table, min_size, inner=object):
    """Raise a ValueError in the name of `function` unless `state` is a QuantizedState
    with this table and `min_size`, and holds a state of the class `inner`.

    A state that was restored from the checkpoint of another transformation fails here.
    """
    place, node, right = "state", state, QuantizedState
    if isinstance(state, QuantizedState):
        place, node, right = "state.inner", state.inner, inner
    if not isinstance(node, right):
        raise ValueError(
            f"jaxfp8.{function}: {place}: expected a {right.__name__}, got "
            f"{type(node).__name__}; restore a checkpoint into what init returns, and "
            "convert a float32 state by jaxfp8.optim.quantize_state"
        )

    def check_leaf(kind, leaf):
        if is_moment(leaf):
            blocks = amax_shape(leaf.data.shape)
            is_right = type(leaf) is kind and leaf.data.dtype == E4M3.dtype
            if is_right and leaf.amax.shape == leaf.exponent.shape == blocks:
                return leaf
        elif not is_large(leaf, min_size):
            return leaf
        raise ValueError(
            f"jaxfp8.{function}: state: expected a {kind.__name__} of float8_e4m3fn "
            "codes with an amax and an exponent for each block, got shapes "
            f"{jax.tree.map(jnp.shape, leaf)} in "
            f"{jax.tree.map(jnp.result_type, leaf)}; restore the checkpoint with the "
            "min_size and the moments that it was made with, or convert it by "
            "jaxfp8.optim.dequantize_state and quantize_state"
        )

    map_moments(check_leaf, state.inner, table)


def is_moment(node):
    return isinstance(node, Moment)


def _is_leaf(node):
    return is_moment(node) or _is_variable(node)


def _is_variable(node):
    return hasattr(node, "get_raw_value")  # a Variable of Flax NNX


def _keep_whole(variable, axis):
    """Take the mesh axes of `axis` out of a Variable's annotations, which it has from a
    parameter of another shape.
    """

    def whole(sharding):
        if isinstance(sharding, NamedSharding):
            spec = PartitionSpec(*whole(sharding.spec))
            return NamedSharding(sharding.mesh, spec)
        return tuple(None if i == axis else name for i, name in enumerate(sharding))

    for annotation in ("out_sharding", "optimizer_sharding"):
        if sharding := variable.get_metadata(annotation, None):
            variable.set_metadata(annotation, whole(sharding))


def is_large(x, min_size):
    """Return whether a leaf is an array of floats with `min_size` elements or more."""
    return (
        jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating)
        and x.ndim > 0
        and x.size >= min_size
    )
