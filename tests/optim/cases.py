"""A transformation whose moment becomes its gradient, moments of every kind of number,
and parameters to train.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ops.test_moments import numbers
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


def quantized_store(kind, seed):
    moments = {Store: {"moment": KINDS[kind]}}
    return optim.quantized(store(), moments=moments, seed=seed, min_size=1)


def moment(kind, shape):
    """Numbers of all sizes, with NaN, infinities and subnormals; the first eighth is
    zeros.
    """
    axis = SHAPES[shape]
    others = np.delete(shape, axis)
    blocks = -(-shape[axis] // 128)
    x = numbers(np.random.default_rng(0), (np.prod(others) * blocks, 128))
    x = x.reshape(*others, blocks * 128)[..., : shape[axis]]
    x = np.moveaxis(x, -1, axis).copy()
    x.reshape(-1)[: x.size // 8] = 0
    return np.abs(x) if kind == "squared" else x


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


def grads(i):
    """Gradients of step `i`, some rows without any."""
    tree = jax.tree.map(lambda x: x * jnp.float32(0.1), params(100 + i))
    return tree | {"embedding": tree["embedding"].at[::3].set(0)}


def train(tx, variables, steps, start=0, opt_state=None):
    """Return `(variables, opt_state)` after some steps."""
    opt_state = tx.init(variables) if opt_state is None else opt_state

    @jax.jit
    def step(variables, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state

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
