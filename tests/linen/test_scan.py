"""Gradients that JAX takes, of layers whose state is read outside of the loop: bit for
bit those of `nn.scan`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from draws import KEY
from equality import assert_same_bits
from programs.linen import STACKED

import jaxfp8

LAYERS, ROWS, WIDTH = 3, 8, 16
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
X = jax.random.normal(KEY, (ROWS, WIDTH))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        dense = nn.Dense(WIDTH, dot_general_cls=jaxfp8.make_dot_general_cls(RECIPE))
        return nn.relu(dense(x)), None


class Model(nn.Module):
    scan: nn.nowrap
    is_class: bool = True

    @nn.compact
    def __call__(self, x):
        if self.is_class:
            return self.scan(Block, **STACKED, length=LAYERS)()(x, None)[0]
        return self.scan(lambda block, x, _: block(x), **STACKED, length=LAYERS)(
            Block(), x, None
        )[0]


def gradients(apply, variables):
    return jax.jit(jax.grad(lambda variables: jnp.sum(apply(variables, X) ** 2)))(
        variables
    )


def after_a_step(model):
    """Variables whose histories are not empty, and their gradient without a reading."""
    variables = model.init(jax.random.key(1), X)
    variables = jaxfp8.update_state(variables, gradients(model.apply, variables))
    return variables, gradients(model.apply, variables)


@pytest.mark.parametrize("is_class", [True, False], ids=["class", "function"])
def test_linen_scan(is_class, reads):
    """Names, parameters and state are those of `nn.scan`."""
    plain, model = (Model(scan, is_class) for scan in (nn.scan, jaxfp8.linen.scan))
    variables, expected = after_a_step(plain)
    assert_same_bits(model.init(jax.random.key(1), X), plain.init(jax.random.key(1), X))
    assert not reads
    assert_same_bits(gradients(model.apply, variables), expected)
    assert reads


def test_state_may_be_mutable():
    """What comes out is float32, as it was."""
    model = Model(jaxfp8.linen.scan)
    variables = model.init(jax.random.key(1), X)
    _, same = jax.jit(functools.partial(model.apply, mutable=True))(variables, X)
    assert_same_bits(same, variables)


def entries(model, variables):
    quantized = jaxfp8.linen.quantize(model, [("none of them", None)])
    train = jaxfp8.linen.TrainState.create(
        apply_fn=model.apply, params=variables, tx=optax.sgd(1.0)
    )
    return {"quantize": quantized.apply, "TrainState": train.apply_fn}


@pytest.mark.parametrize("entry", ["quantize", "TrainState"])
def test_entries(entry, reads):
    model = Model(nn.scan)
    variables, expected = after_a_step(model)
    assert not reads
    assert_same_bits(gradients(entries(model, variables)[entry], variables), expected)
    assert reads


def test_two_entries_in_one_loss():
    """Two readings of one state: their next states combine by max, where those of two
    scans would add.
    """
    model = Model(nn.scan)
    variables, _ = after_a_step(model)
    apply = entries(model, variables)

    def loss(first, second, variables):
        return jnp.sum(first(variables, X) ** 2) + jnp.sum(
            second(variables, 2 * X) ** 2
        )

    expected = jax.jit(jaxfp8.grad(functools.partial(loss, model.apply, model.apply)))(
        variables
    )
    got = jax.jit(jax.grad(functools.partial(loss, *apply.values())))(variables)
    state = jaxfp8.OVERWRITE_WITH_GRADIENT
    assert_same_bits(got[state], expected[state])


def test_equal_train_states_have_equal_programs():
    """The function is a static field, by which jit finds its programs."""
    model = Model(nn.scan)
    variables = model.init(jax.random.key(1), X)
    one, other = (
        jaxfp8.linen.TrainState.create(
            apply_fn=model.apply, params=variables, tx=optax.identity()
        )
        for _ in range(2)
    )
    assert one.apply_fn == other.apply_fn and hash(one.apply_fn) == hash(other.apply_fn)


def test_a_scale_from_inside_of_a_loss():
    """In place of a reading, a loss that logs a scale has the stored scale."""
    model = Model(nn.scan)
    variables, _ = after_a_step(model)
    state = variables[jaxfp8.OVERWRITE_WITH_GRADIENT]

    def loss(variables):
        return jnp.sum(model.apply(variables, X) ** 2), variables[
            jaxfp8.OVERWRITE_WITH_GRADIENT
        ]

    logged = jax.jit(jaxfp8.grad(loss, has_aux=True))(variables)[1]
    assert_same_bits(logged, state)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(logged))
