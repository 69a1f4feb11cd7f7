"""adamw: AdamW whose step on moments in FP8 is one op, and can be one pass over the
parameters.
"""

import functools
import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .. import ops
from ..numerics import _scaling
from ..train import AppliedTransformation
from ._moments import block_axis
from ._quantized import (
    MOMENTS,
    QuantizedState,
    block_keys,
    check,
    check_min_size,
    is_moment,
    leaf_key,
    quantize_state,
    refuse_state,
    to_seed,
)

# Leaves of up to this number of elements share a launch.
_SMALL = 2**20


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    weight_decay: ArrayLike = 1e-4,
    mask: Any = None,
    max_norm: ArrayLike | None = None,
    min_size: int = 4096,
    seed: int = 0,
) -> AppliedTransformation:
    """Make AdamW with moments in FP8: `quantized(optax.adamw(...))` with one op that
    does all of a step.

        tx = jaxfp8.optim.adamw(1e-3, max_norm=1.0)
        opt_state = tx.init(params)
        params, opt_state = tx.apply(grads, opt_state, params)

    For a large leaf, or for several small ones, one op decodes moments, averages,
    divides and encodes: no moment is in memory in f32, but on TPUs. `apply` also writes
    the next parameters, so that a step moves 16.3 bytes a parameter; float32 Adam moves
    28, and `update` with `optax.apply_updates` 24.3. `update` is that of any
    transformation, for `optax.chain` and everything that takes one.

        m = (1 - b1) g + b1 m
        v = (1 - b2) g**2 + b2 v
        p = p - learning_rate (
            m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps)
            + weight_decay p
        )

    Averages of moments in FP8 are f32 whatever the dtype of a parameter, with 0 in
    place of products below 2**-102, of squares below 2**-125. Moments of less than
    `min_size` elements stay as optax keeps them, and are stepped by optax. Nothing
    differentiates through a step.

    Args:
        learning_rate, b1, b2, eps, eps_root, weight_decay: as in `optax.adamw`. The
            learning rate and the weight decay may be functions of the number of steps
            so far. `eps` and `eps_root` are 0 or normal f32 numbers.
        mask: a tree of bools, or a function from parameters to one, which says what
            `weight_decay` decays.
        max_norm: gradients whose global norm is larger are scaled to this norm first,
            as by `optax.clip_by_global_norm`, in the same pass; in a chain, clipped
            gradients would be written and read. Inside of `jax.shard_map` it is the
            norm of the shards of one device.
        min_size: the number of elements from which on a moment is quantized.
        seed: an int, modulo 2**32 the seed of the random bits that round moments. In
            `optax.inject_hyperparams` name it, as `static_args=("min_size", "seed")`.

    Returns:
        The transformation; its state is the `QuantizedState` of an
        `optax.ScaleByAdamState`.

    Raises:
        TypeError: `seed` or `min_size` is no int, or another option no number.
        ValueError: `max_norm` is not positive, or a number is finite and in float32 is
            not. In `init`, `mask` has another tree than the parameters, or these hold
            FP8 state: wrap the transformation in `jaxfp8.train.optimizer`. In `apply`
            and `update`, the state is of another transformation, a gradient has another
            shape than its parameter, or `params` is None; of `update` it may be if
            `weight_decay` is the number 0 and there is no mask.
    """
    seed = to_seed("optim.adamw", seed)
    check_min_size("optim.adamw", min_size)
    options = {
        "learning_rate": learning_rate,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "eps_root": eps_root,
    }
    for name, value in (
        options | {"weight_decay": weight_decay, "max_norm": max_norm}
    ).items():
        _check_number(name, value)
    small = optax.scale_by_adam(b1, b2, eps, eps_root)

    if not (
        max_norm is None
        or isinstance(max_norm, jax.core.Tracer)
        or np.all(np.asarray(max_norm) > 0)
    ):
        raise ValueError(
            f"optim.adamw: max_norm: expected a positive number, got {max_norm}"
        )
    is_decayed = mask is not None or not (
        isinstance(weight_decay, (int, float)) and weight_decay == 0
    )

    def init(params):
        refuse_state("optim.adamw", params)
        if mask is not None:
            jax.tree.broadcast(mask(params) if callable(mask) else mask, params)
        return quantize_state(small.init(params), min_size=min_size)

    def numbers(count, rate, factor, decay):
        """Return the numbers of a step as `ops.adam_update` takes them; `count` is that
        of this step.
        """
        one, t = jnp.float32(1), count.astype(jnp.float32)
        averages = (x for b in (b1, b2) for x in (b, 1 - b))
        unbias = (one / (one - jnp.asarray(b, jnp.float32) ** t) for b in (b1, b2))
        return jnp.stack(
            [
                jnp.asarray(x, jnp.float32)
                for x in (*averages, *unbias, eps_root, eps, rate, decay, factor)
            ]
        )

    def step(name, grads, state, params):
        """Return the updates, or of `apply` the next parameters, and the next state."""
        # 1. Bring the leaves of all trees together.
        applies = name == "apply"
        if params is None and (applies or is_decayed):
            raise ValueError(
                f"optim.adamw: {name}: params: expected the parameters, got None; "
                f"pass them: tx.{name}(grads, opt_state, params)"
            )
        check(f"optim.adamw: {name}", state, MOMENTS, min_size, optax.ScaleByAdamState)
        steps = state.inner.count
        decay = weight_decay(steps) if callable(weight_decay) else weight_decay
        leaves, treedef = _leaves(name, grads, state.inner, params, decay, mask)
        count = optax.safe_increment(steps)
        rate = learning_rate(steps) if callable(learning_rate) else learning_rate
        factor = _clip_factor([leaf.grad for leaf in leaves], max_norm)

        # 2. Let optax step the leaves whose moments are not in FP8.
        plain = [leaf for leaf in leaves if not is_moment(leaf.mu)]
        results = _step_by_optax(
            small, plain, steps, None if max_norm is None else factor
        )

        # 3. Step the others by one op for a large leaf, or for several small ones; of
        #    float32 parameters up to the end.
        quantized = [leaf for leaf in leaves if is_moment(leaf.mu)]
        written = set()
        if applies:
            written = {
                leaf.number for leaf in quantized if leaf.param.dtype == jnp.float32
            }

        def keys(leaf):
            # The leaves of the state are numbered: the count, all of mu, all of nu.
            places = np.uint32([1 + leaf.number, 1 + leaf.number + len(leaves)])
            keys = leaf_key(seed, state.update_count, places)
            return jax.vmap(functools.partial(block_keys, shape=leaf.grad.shape))(keys)

        for is_written, group in _groups(quantized, written):
            results |= _step_by_op(
                group, is_written, functools.partial(numbers, count, rate, factor), keys
            )

        # 4. Decay and scale what is an update yet.
        outs, mu, nu = (
            [results[leaf.number][part] for leaf in leaves] for part in range(3)
        )
        outs = [
            out if leaf.number in written else _decayed(leaf, out, rate, applies)
            for leaf, out in zip(leaves, outs, strict=True)
        ]
        inner = optax.ScaleByAdamState(
            count, treedef.unflatten(mu), treedef.unflatten(nu)
        )
        return treedef.unflatten(outs), QuantizedState(
            optax.safe_increment(state.update_count), inner
        )

    def update(grads, state, params=None, **extra_args):
        del extra_args
        return step("update", grads, state, params)

    def apply(grads, state, params):
        return step("apply", grads, state, params)

    return AppliedTransformation(init, update, apply)


def _check_number(name, value):
    """Raise unless an option is a number that float32 can hold, an array or a schedule;
    `max_norm` may be None.
    """
    if (
        callable(value)
        or hasattr(value, "dtype")
        or (name == "max_norm" and value is None)
    ):
        return
    if not isinstance(value, numbers.Real):
        raise TypeError(f"optim.adamw: {name}: expected a number, got {value!r}")
    if np.isinf(_scaling.to_float32(value)) and abs(value) != math.inf:
        raise ValueError(
            f"optim.adamw: {name}: expected a number that is finite in float32, got "
            f"{value!r}"
        )


class _Leaf(NamedTuple):
    """A leaf of the parameters, in a step.

    Attributes:
        number: its place among all leaves.
        grad: the gradient.
        param: the parameter; None where the step has none.
        mu, nu: the moments: arrays, or moments in FP8.
        decay: the weight decay.
    """

    number: int
    grad: jax.Array
    param: jax.Array | None
    mu: Any
    nu: Any
    decay: ArrayLike


def _leaves(name, grads, inner, params, decay, mask):
    """Return the leaves of all trees of a step, and the structure of the trees."""
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_leaves_with_path(grads)
    ]
    grads, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
    mu, nu = treedef.flatten_up_to(inner.mu), treedef.flatten_up_to(inner.nu)
    if params is None:
        params = [None] * len(grads)
    else:
        params = list(map(jnp.asarray, treedef.flatten_up_to(params)))
    for path, grad, moment in zip(paths, grads, mu, strict=True):
        shape = jax.tree.leaves(moment)[0].shape  # that of its codes
        if grad.shape != shape:
            raise ValueError(
                f"optim.adamw: {name}: grads{path}: expected the shape of the "
                f"parameter, {shape}, got {grad.shape}"
            )
    if mask is None:
        decays = [decay] * len(grads)
    else:
        decays = _decays(mask, treedef, params, decay)
    parts = zip(range(len(grads)), grads, params, mu, nu, decays, strict=True)
    return [_Leaf(*leaf) for leaf in parts], treedef


def _step_by_optax(small, leaves, count, factor):
    """Return `(update, mu, nu)` of leaves by their numbers; `factor`, unless it is
    None, clips the gradients.
    """
    grads = [leaf.grad for leaf in leaves]
    if factor is not None:
        grads = [(grad * factor).astype(grad.dtype) for grad in grads]
    mu, nu = [leaf.mu for leaf in leaves], [leaf.nu for leaf in leaves]
    updates, state = small.update(grads, optax.ScaleByAdamState(count, mu, nu))
    results = zip(updates, state.mu, state.nu, strict=True)
    return {leaf.number: r for leaf, r in zip(leaves, results, strict=True)}


def _step_by_op(leaves, is_written, numbers, keys):
    """Return `(out, mu, nu)` of leaves with moments in FP8 by their numbers.

    Args:
        leaves: the leaves of one call.
        is_written: whether `out` is the next parameter, else the update.
        numbers: a function of the weight decay; see `ops.AdamLeaf`.
        keys: a function of the leaf; see `ops.AdamLeaf`.
    """
    arguments = [
        ops.AdamLeaf(
            grads=leaf.grad.astype(jnp.float32),
            params=leaf.param if is_written else None,
            mu=tuple(jax.tree.leaves(leaf.mu)),
            nu=tuple(jax.tree.leaves(leaf.nu)),
            keys=keys(leaf),
            numbers=numbers(leaf.decay),
        )
        for leaf in leaves
    ]
    axes = [block_axis(leaf.grad.shape) for leaf in leaves]
    results = {}
    stepped = ops.adam_update(arguments, axes)
    for leaf, (out, mu, nu) in zip(leaves, stepped, strict=True):
        mu = jax.tree.structure(leaf.mu).unflatten(mu)
        nu = jax.tree.structure(leaf.nu).unflatten(nu)
        results[leaf.number] = out, mu, nu
    return results


def _decayed(leaf, update, rate, applies):
    """Return the update with decay and rate, or with `applies` the next parameter, in
    the dtype in which optax adds a parameter and its update.
    """
    grad, param = leaf.grad, leaf.param
    if param is None:
        is_float = jnp.issubdtype(grad.dtype, jnp.floating)
        return (-rate * update).astype(grad.dtype if is_float else jnp.float32)
    change = -rate * (update + leaf.decay * param)
    if applies:
        return (param + change).astype(param.dtype)
    return change.astype(jnp.result_type(grad.dtype, param.dtype))


def _decays(mask, treedef, params, weight_decay):
    """Return the weight decay of each leaf."""
    mask = mask(treedef.unflatten(params)) if callable(mask) else mask
    return [
        jnp.where(x, weight_decay, 0)
        for x in jax.tree.leaves(jax.tree.broadcast(mask, treedef.unflatten(params)))
    ]


def _clip_factor(grads, max_norm):
    """Return the factor that brings the global norm of the gradients down to
    `max_norm`.
    """
    if max_norm is None:
        return jnp.float32(1)
    norm = optax.tree.norm([grad.astype(jnp.float32) for grad in grads])
    return jnp.where(norm < max_norm, jnp.float32(1), max_norm / norm)


def _groups(leaves, written):
    """Divide leaves among calls of the op, as pairs `(is_written, leaves)`: a large
    leaf alone, and small leaves of a kind together.
    """
    groups = {}
    for leaf in leaves:
        is_written = leaf.number in written
        large = leaf.number if leaf.grad.size > _SMALL else None
        groups.setdefault((is_written, large), []).append(leaf)
    return [(is_written, group) for (is_written, _), group in groups.items()]
