"""What docs/state.md says of mistakes that `update_state` finds: what is loud, what is
undone, what is bounded. Mistakes that the page calls silent have no test.

A mistake is a function of `jit`, `jax.jit` or one that changes nothing. It returns the
variables after the mistake, and those of the same steps without it.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8

OWG, STATE = "_overwrite_with_gradient", "Fp8DotGeneral_0"
X = jax.random.normal(jax.random.key(0), (8, 16)) * 3
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
    return lambda jit: [train(jit, trained(), spoil=each) for each in (spoil, kept)]


def by(tx, sizes):
    """Optax's own loop over all variables and one more step."""

    def mistake(jit):
        variables = fresh()
        opt_state = jit(tx.init)(variables)
        for size in sizes:
            grads = gradient(variables, size)
            updates, opt_state = jit(tx.update)(grads, opt_state, variables)
            variables = optax.apply_updates(variables, updates)
        return train(jit, variables), train(jit, fresh(), (*sizes, 1.0))

    return mistake


def times(factor):
    return lambda grads: jax.tree.map(lambda leaf: leaf * jnp.float32(factor), grads)


LOUD, UNDONE, BOUNDED = "loud", "undone", "bounded"
STEP = jaxfp8.train.optimizer(optax.sgd(1e-6))
# Lines of the page, up to the colon: what follows, and the mistake.
MISTAKES = {
    "clipped as a whole": (
        LOUD,
        once(lambda grads: optax.clip_by_global_norm(0.37).update(grads, None)[0]),
    ),
    "divided by a number that is no power of two": (LOUD, once(times(1 / 3))),
    "of another step": (LOUD, once(lambda _: gradient(trained(1)))),
    "averaged over steps": (
        LOUD,
        by(optax.chain(optax.ema(0.9), STEP), (1.0, 2.0, 3.0)),
    ),
    "stepped by an optimizer from the first step on": (
        LOUD,
        by(optax.adam(1e-3), (1.0,)),
    ),
    "divided by a power of two": (UNDONE, once(times(2.0**-15))),
    "summed over 2, 3, … uses or devices": (BOUNDED, once(times(3))),
    "multiplied by a power of two": (BOUNDED, once(times(2.0**15))),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_outside_of_jit(mistake):
    _, make = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"update_state: .*{STATE}"):
        make(kept)


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_under_jit(mistake):
    kind, make = MISTAKES[mistake]
    after, right = make(jax.jit)
    assert bool(jnp.isfinite(LAYER.apply(after, X)).all()) == (kind != LOUD)
    told = "an optimizer has stepped on it, or under jit"
    assert (told in str(jaxfp8.inspect.summary(after))) == (kind == LOUD)
    for name, leaf in after[OWG][STATE].items():
        true = right[OWG][STATE][name]
        if kind == UNDONE:
            np.testing.assert_array_equal(leaf, true)
        if kind == BOUNDED:
            slot_0 = int(name.endswith("history"))
            np.testing.assert_array_equal(leaf[slot_0:], true[slot_0:])
            assert leaf[0] >= true[0]
