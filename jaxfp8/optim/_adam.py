"""adamw: AdamW whose step on moments in FP8 is one op, and can be one pass over the
parameters.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from .. import ops
from ..train import AppliedTransformation
from ._moments import block_axis
from ._quantized import (
    MOMENTS,
    QuantizedState,
    block_keys,
    check,
    is_moment,
    quantize_state,
    refuse_state,
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
    divides and encodes: no moment is in memory in f32, but where jnp runs. `apply` also
    writes the next parameters, so that a step moves 16.3 bytes a parameter; float32
    Adam moves 28, and `update` with `optax.apply_updates` 24.3. `update` is that of any
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
        TypeError: `seed` is no int.
        ValueError: `max_norm` is not positive. In `init`, `mask` has another tree than
            the parameters, or these hold FP8 state: wrap the transformation in
            `jaxfp8.train.optimizer`. In `apply` and `update`, the state is of another
            transformation, a gradient has another shape than its parameter, or `params`
            is None.
    """
    seed = operator.index(seed) % 2**32
    small = optax.scale_by_adam(b1, b2, eps, eps_root)

    is_known = max_norm is not None and not isinstance(max_norm, jax.core.Tracer)
    if is_known and not max_norm > 0:
        raise ValueError(
            f"optim.adamw: max_norm: expected a positive number, got {max_norm}"
        )

    def init(params):
        refuse_state("optim.adamw", params)
        if mask is not None:
            _masked(mask, params)
        return quantize_state(small.init(params), min_size=min_size)

    def step(name, grads, state, params):
        """Return the updates, or of `apply` the next parameters, and the next state."""
        # 1. Bring the leaves of all trees together.
        if params is None:
            raise ValueError(
                f"optim.adamw: {name}: params: expected the parameters, got None; "
                f"pass them: tx.{name}(grads, opt_state, params)"
            )
        check(f"optim.adamw: {name}", state, MOMENTS, min_size, optax.ScaleByAdamState)
        steps = state.inner.count
        decay, rate = _at(weight_decay, steps), _at(learning_rate, steps)
        leaves, treedef = _leaves(name, grads, state.inner, params, decay, mask)
        count = optax.safe_increment(steps)
        factor = _clip_factor([leaf.grad for leaf in leaves], max_norm)

        # 2. Let optax step the leaves whose moments are not in FP8.
        plain = [leaf for leaf in leaves if not is_moment(leaf.mu)]
        clips = None if max_norm is None else factor
        results = _step_by_optax(small, plain, steps, clips)

        # 3. Step the others by one op for a large leaf, or for several small ones; of
        #    float32 parameters up to the end.
        def keys(leaf):
            # The leaves of the state are numbered: the count, all of mu, all of nu.
            places = np.uint32([1 + leaf.number, 1 + leaf.number + len(leaves)])

            def of_moment(place):
                return block_keys(seed, state.update_count, place, leaf.grad.shape)

            return jax.vmap(of_moment)(places)

        def numbers(decay):
            """Return the numbers of a step as `ops.adam_update` takes them."""
            one, t = jnp.float32(1), count.astype(jnp.float32)
            unbias = [one / (one - jnp.asarray(b, jnp.float32) ** t) for b in (b1, b2)]
            averages = b1, 1 - b1, b2, 1 - b2, *unbias
            options = *averages, eps_root, eps, rate, decay, factor
            return jnp.stack([jnp.asarray(x, jnp.float32) for x in options])

        for group in _groups(leaves):
            results |= _step_by_op(group, numbers, keys)

        # 4. Decay and scale what is an update yet.
        outs, mu, nu = [], [], []
        for leaf in leaves:
            out, m, v = results[leaf.number]
            outs.append(_decayed(leaf, out, rate, name == "apply"))
            mu.append(m)
            nu.append(v)
        inner = optax.ScaleByAdamState(
            count, treedef.unflatten(mu), treedef.unflatten(nu)
        )
        update_count = optax.safe_increment(state.update_count)
        return treedef.unflatten(outs), QuantizedState(update_count, inner)

    def update(grads, state, params=None, **extra_args):
        del extra_args
        return step("update", grads, state, params)

    def apply(grads, state, params):
        return step("apply", grads, state, params)

    return AppliedTransformation(init, update, apply)


def _at(value, steps):
    """Return a number, or what a schedule gives after so many steps."""
    return value(steps) if callable(value) else value


class _Leaf(NamedTuple):
    """A leaf of the parameters, in a step.

    Attributes:
        number: its place among all leaves.
        grad, param: the gradient and the parameter.
        mu, nu: the moments: arrays, or moments in FP8.
        decay: the weight decay.
        is_written: whether the op writes the next parameter, in place of an update.
    """

    number: int
    grad: jax.Array
    param: jax.Array
    mu: Any
    nu: Any
    decay: ArrayLike
    is_written: bool


def _leaves(name, grads, inner, params, decay, mask):
    """Return the leaves of all trees of a step, and the structure of the trees."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(grads)
    mu, nu, params = map(treedef.flatten_up_to, (inner.mu, inner.nu, params))
    decays = [decay] * len(flat)
    if mask is not None:
        is_decayed = _masked(mask, treedef.unflatten(params))
        decays = [jnp.where(x, decay, 0) for x in is_decayed]
    leaves = []
    for i, (path, grad) in enumerate(flat):
        grad, param = jnp.asarray(grad), jnp.asarray(params[i])
        shape = jax.tree.leaves(mu[i])[0].shape  # that of its codes
        if grad.shape != shape:
            raise ValueError(
                f"optim.adamw: {name}: grads{jax.tree_util.keystr(path)}: expected "
                f"the shape of the parameter, {shape}, got {grad.shape}"
            )
        is_written = is_moment(mu[i]) and name == "apply" and param.dtype == jnp.float32
        leaves.append(_Leaf(i, grad, param, mu[i], nu[i], decays[i], is_written))
    return leaves, treedef


def _masked(mask, params):
    """Return what a mask says of each leaf of the parameters."""
    mask = mask(params) if callable(mask) else mask
    return jax.tree.leaves(jax.tree.broadcast(mask, params))


def _step_by_optax(small, leaves, count, factor):
    """Return `(update, mu, nu)` of leaves by their numbers; `factor`, unless it is
    None, clips the gradients.
    """
    grads = [leaf.grad for leaf in leaves]
    if factor is not None:
        grads = [(grad * factor).astype(grad.dtype) for grad in grads]
    mu, nu = [leaf.mu for leaf in leaves], [leaf.nu for leaf in leaves]
    updates, state = small.update(grads, optax.ScaleByAdamState(count, mu, nu))
    numbers = [leaf.number for leaf in leaves]
    results = zip(updates, state.mu, state.nu, strict=True)
    return dict(zip(numbers, results, strict=True))


def _step_by_op(leaves, numbers, keys):
    """Return `(out, mu, nu)` of leaves with moments in FP8 by their numbers.

    Args:
        leaves: the leaves of one call.
        numbers: a function of the weight decay; see `ops.AdamLeaf`.
        keys: a function of the leaf; see `ops.AdamLeaf`.
    """
    arguments = []
    for leaf in leaves:
        param = leaf.param if leaf.is_written else None
        grad, step = leaf.grad.astype(jnp.float32), numbers(leaf.decay)
        arguments.append(ops.AdamLeaf(grad, param, leaf.mu, leaf.nu, keys(leaf), step))
    axes = [block_axis(leaf.grad.shape) for leaf in leaves]
    places = [leaf.number for leaf in leaves]
    return dict(zip(places, ops.adam_update(arguments, axes), strict=True))


def _decayed(leaf, update, rate, applies):
    """Return the update with decay and rate, or with `applies` the next parameter, in
    the dtype in which optax adds a parameter and its update.
    """
    grad, param = leaf.grad, leaf.param
    if leaf.is_written:
        return update
    change = -rate * (update + leaf.decay * param)
    if applies:
        return (param + change).astype(param.dtype)
    return change.astype(jnp.result_type(grad.dtype, param.dtype))


def _clip_factor(grads, max_norm):
    """Return the factor that brings the global norm of the gradients down to
    `max_norm`.
    """
    if max_norm is None:
        return jnp.float32(1)
    norm = optax.tree.norm([grad.astype(jnp.float32) for grad in grads])
    return jnp.where(norm < max_norm, jnp.float32(1), max_norm / norm)


def _groups(leaves):
    """Divide leaves with moments in FP8 among calls of the op: a large leaf alone, and
    small leaves of a kind together.
    """
    groups = {}
    for leaf in leaves:
        if is_moment(leaf.mu):
            large = leaf.number if leaf.grad.size > _SMALL else None
            groups.setdefault((leaf.is_written, large), []).append(leaf)
    return groups.values()
