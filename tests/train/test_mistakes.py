"""What docs/state.md calls loud among mistakes that `update_state` finds. What it
undoes or bounds is in `test_update_state.py`; what is silent has no test.

A mistake is a function of `jit`, `jax.jit` or one that changes nothing, and returns the
variables after it.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from draws import KEY
from parametrize import each_row

import jaxfp8

X = jax.random.normal(KEY, (8, 16)) * 3
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
LAYER = nn.Dense(4, dot_general_cls=jaxfp8.make_dot_general_cls(RECIPE))

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")


@jax.jit
@jax.grad
def gradient(variables, size=1.0):
    return jnp.sum(LAYER.apply(variables, X * size) ** 2)


def kept(grads):
    return grads


@functools.cache
def fresh():
    return LAYER.init(jax.random.key(1), X)


def train(jit, variables, sizes=(1.0,), spoil=kept):
    """Steps that store the state and leave the parameters as they are."""
    for size in sizes:
        grads = spoil(gradient(variables, size))
        variables = jit(jaxfp8.update_state)(variables, grads)
    return variables


@functools.cache
def trained(steps=3):
    return train(jax.jit, fresh(), range(1, steps + 1))


def once(spoil):
    """The gradient of one step after some is spoiled."""
    return lambda jit: train(jit, trained(), spoil=spoil)


def by(tx, sizes):
    """Optax's own loop over all variables and one more step."""

    def mistake(jit):
        variables = fresh()
        opt_state = jit(tx.init)(variables)
        for size in sizes:
            grads = gradient(variables, size)
            updates, opt_state = jit(tx.update)(grads, opt_state, variables)
            variables = optax.apply_updates(variables, updates)
        return train(jit, variables)

    return mistake


STEP = jaxfp8.train.optimizer(optax.sgd(1e-6))
# Lines of the page, up to the colon.
MISTAKES = {
    "clipped as a whole": once(
        lambda grads: optax.clip_by_global_norm(0.37).update(grads, None)[0]
    ),
    "divided by a number that is no power of two": once(
        lambda grads: jax.tree.map(lambda leaf: leaf / 3, grads)
    ),
    "of another step": once(lambda _: gradient(trained(1))),
    "averaged over steps": by(optax.chain(optax.ema(0.9), STEP), (1.0, 2.0, 3.0)),
    "stepped by an optimizer from the first step on": by(optax.adam(1e-3), (1.0,)),
}


@each_row("mistake", MISTAKES)
def test_loud_mistakes(mistake):
    """An error outside of jit; under jit NaN, and the summary says why."""
    with pytest.raises(ValueError, match="update_state: .*Fp8DotGeneral_0"):
        mistake(kept)
    after = mistake(jax.jit)
    assert not jnp.isfinite(LAYER.apply(after, X)).all()
    told = "an optimizer has stepped on it, or under jit"
    assert told in str(jaxfp8.inspect.summary(after))
