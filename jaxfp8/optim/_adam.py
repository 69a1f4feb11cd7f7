"""adamw: AdamW whose step on moments in FP8 is one op, and can be one pass over the
parameters.
"""

import functools
import math
import numbers
from typing import Any

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
        p = p - learning_rate (m / (1 - b1**t) / (sqrt(v / (1 - b2**t) + eps_root) + eps) + weight_decay p)

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

    def numbers(count, rate, decay, factor):
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
        paths = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(grads)
        ]
        grads, treedef = jax.tree.flatten(jax.tree.map(jnp.asarray, grads))
        params = (
            [None] * len(grads)
            if params is None
            else list(map(jnp.asarray, treedef.flatten_up_to(params)))
        )
        moments = [
            treedef.flatten_up_to(tree) for tree in (state.inner.mu, state.inner.nu)
        ]
        for path, grad, mu in zip(paths, grads, moments[0], strict=True):
            shape = jax.tree.leaves(mu)[0].shape  # that of its codes
            if grad.shape != shape:
                raise ValueError(
                    f"optim.adamw: {name}: grads{path}: expected the shape of the "
                    f"parameter, {shape}, got {grad.shape}"
                )
        steps = state.inner.count
        decay = weight_decay(steps) if callable(weight_decay) else weight_decay
        decays = (
            [decay] * len(grads)
            if mask is None
            else _decays(mask, treedef, params, decay)
        )
        count = optax.safe_increment(steps)
        rate = learning_rate(steps) if callable(learning_rate) else learning_rate
        factor = _clip_factor(grads, max_norm)

        # 2. Let optax step the leaves whose moments are not in FP8.
        plain = [i for i, mu in enumerate(moments[0]) if not is_moment(mu)]
        plain_state = optax.ScaleByAdamState(
            state.inner.count, *([tree[i] for i in plain] for tree in moments)
        )
        clipped = [
            grads[i] if max_norm is None else (grads[i] * factor).astype(grads[i].dtype)
            for i in plain
        ]
        updates, plain_state = small.update(clipped, plain_state)
        results = dict(
            zip(
                plain,
                zip(updates, plain_state.mu, plain_state.nu, strict=True),
                strict=True,
            )
        )

        # 3. Step the others by one op for a large leaf, or for several small ones; of
        #    float32 parameters up to the end.
        written = {
            i
            for i in range(len(grads))
            if applies and i not in results and params[i].dtype == jnp.float32
        }
        for group in _groups(
            [i for i in range(len(grads)) if i not in results], grads, written
        ):
            leaves = []
            for i in group:
                mu, nu = (tuple(jax.tree.leaves(tree[i])) for tree in moments)
                # The leaves of the state are numbered: the count, all of mu, all of nu.
                keys = leaf_key(
                    seed, state.update_count, np.uint32([1 + i, 1 + i + len(grads)])
                )
                keys = jax.vmap(functools.partial(block_keys, shape=grads[i].shape))(
                    keys
                )
                rest = numbers(count, rate, decays[i], factor)
                param = params[i] if i in written else None
                leaves.append(
                    ops.AdamLeaf(
                        grads[i].astype(jnp.float32), param, mu, nu, keys, rest
                    )
                )
            stepped = ops.adam_update(
                leaves, [block_axis(grads[i].shape) for i in group]
            )
            for i, (out, *new) in zip(group, stepped, strict=True):
                kinds = (jax.tree.structure(tree[i]) for tree in moments)
                results[i] = (
                    out,
                    *(kind.unflatten(x) for kind, x in zip(kinds, new, strict=True)),
                )

        # 4. Decay and scale what is an update yet, in the dtype in which optax adds a
        #    parameter and its update.
        outs, mu, nu = (
            [results[i][part] for i in range(len(grads))] for part in range(3)
        )
        for i in set(range(len(grads))) - written:
            if params[i] is None:
                outs[i] = (-rate * outs[i]).astype(
                    grads[i].dtype
                    if jnp.issubdtype(grads[i].dtype, jnp.floating)
                    else jnp.float32
                )
            else:
                change = -rate * (outs[i] + decays[i] * params[i])
                dtype = jnp.result_type(grads[i].dtype, params[i].dtype)
                outs[i] = (
                    (params[i] + change).astype(params[i].dtype)
                    if applies
                    else change.astype(dtype)
                )
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


def _groups(indices, grads, written):
    """Divide leaves among calls of the op: a large leaf alone, and small leaves of a
    kind together.
    """
    groups = {}
    for i in indices:
        groups.setdefault(
            (i in written, i if grads[i].size > _SMALL else None), []
        ).append(i)
    return groups.values()
