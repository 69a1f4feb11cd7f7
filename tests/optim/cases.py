"""A transformation whose moment becomes its gradient, moments of every kind of number,
and parameters to train.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oracle import bits

from jaxfp8 import optim

KINDS = {"signed": optim.SignedMoment, "squared": optim.SquaredMoment}
# Shape, and the axis along which blocks have to lie: the last with 64 elements, or else
# the largest.
SHAPES = {
    (64, 256): 1,
    (3, 40, 300): 2,
    (5000,): 0,
    (128, 64): 1,
    (4, 96, 20): 1,
    (20, 30, 30): 2,
    (256, 3): 0,
}


class Store(NamedTuple):
    """The state of `store`."""

    moment: jax.Array


def store():
    """The moment is the last gradient."""
    return optax.GradientTransformation(
        lambda params: Store(params), lambda grads, state, params: (grads, Store(grads))
    )


def quantized_store(kind, **kwargs):
    kwargs = {"min_size": 1} | kwargs
    return optim.quantized(store(), moments={Store: {"moment": KINDS[kind]}}, **kwargs)


def moment(kind, shape, seed=0):
    """Blocks of one octave, of many, of all, with zeros, NaN, infinities and the
    largest and smallest numbers.
    """
    rng = np.random.default_rng(seed)
    axis = SHAPES.get(shape, len(shape) - 1)
    blocks = [-(-size // 128) if i == axis else size for i, size in enumerate(shape)]

    def of_blocks(values):
        return np.repeat(values, min(shape[axis], 128), axis).take(
            range(shape[axis]), axis
        )

    spans = of_blocks(rng.choice([1.0, 4.0, 8.0, 20.0, 60.0], blocks))
    x = (
        rng.uniform(1, 2, shape)
        * 2.0 ** rng.uniform(-spans, 0)
        * of_blocks(10.0 ** rng.integers(-12, 13, blocks))
    )
    x = np.where(rng.random(shape) < 0.02, 0, x).astype(np.float32)
    if kind == "squared":
        x = np.square(x)
        # XLA's CPU threads take subnormal numbers for zeros
        x[x < np.finfo(np.float32).tiny] = 0
    flat = x.reshape(-1)
    flat[::97] = 0
    flat[5::1999] = np.nan
    flat[11::1777] = np.inf
    flat[13::1571] = np.finfo(np.float32).max
    flat[17::1301] = np.finfo(np.float32).tiny
    flat[: flat.size // 8] = 0
    return x if kind == "squared" else np.where(rng.random(shape) < 0.5, -x, x)


def params(seed=0):
    """Kernels whose sizes 128 divides and does not, a stack of layers, an embedding,
    and leaves that stay float32.
    """
    shapes = {
        "dense": {"kernel": (64, 256), "bias": (256,)},
        "odd": {"kernel": (48, 200)},
        "layers": {"kernel": (3, 64, 96), "scale": (3, 64)},
        "embedding": (100, 64),
    }
    rng = np.random.default_rng(seed)
    make = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(make, shapes, is_leaf=lambda node: isinstance(node, tuple))


def grads(i, like=None):
    """Gradients of step `i`, some rows without any."""
    tree = jax.tree.map(
        lambda x: x * jnp.float32(0.1), params(100 + i) if like is None else like
    )
    return tree | {"embedding": tree["embedding"].at[::3].set(0)}


def train(tx, variables, steps, start=0, opt_state=None, **jit):
    """Return `(variables, opt_state)` after some steps."""
    opt_state = tx.init(variables) if opt_state is None else opt_state

    def step(variables, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state

    step = jax.jit(step, **jit)
    for i in range(start, start + steps):
        variables, opt_state = step(variables, opt_state, grads(i))
    return variables, opt_state


def same_codes(a, b) -> float:
    """Return which share of the codes of two moments is the same."""
    return np.mean(bits(a.data) == bits(b.data))


def moments(tree):
    """Return the moments in FP8 of a tree, in order."""
    is_moment = lambda node: isinstance(node, optim.Moment)  # noqa: E731
    return [
        leaf for leaf in jax.tree.leaves(tree, is_leaf=is_moment) if is_moment(leaf)
    ]
