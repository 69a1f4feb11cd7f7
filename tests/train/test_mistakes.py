"""Each line of docs/state.md's list of mistakes: what is loud, what is undone or
bounded, and what is silent.

A mistake is a function of `jit`, `jax.jit` or one that changes nothing. It returns the
variables after the mistake, and those of the same steps without it.
"""

import functools
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8

OWG, STATE = "_overwrite_with_gradient", "Fp8DotGeneral_0"
X = jax.random.normal(jax.random.key(0), (8, 16)) * 3
SPIKE = (100.0, 1.0, 1.0, 1.0)  # sizes of four microbatches

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")


def layer_of(history):
    recipe = jaxfp8.DelayedScaling(amax_history_len=history)
    return nn.Dense(4, dot_general_cls=jaxfp8.make_dot_general_cls(recipe))


LAYER, SHORT = layer_of(4), layer_of(1)


@functools.cache
def gradient_of(layer):
    return jax.jit(
        jax.grad(lambda variables, x: jnp.sum(layer.apply(variables, x) ** 2))
    )


def gradient(variables, size=1.0, layer=LAYER):
    return gradient_of(layer)(variables, X * size)


def kept(grads):
    return grads


@functools.cache
def fresh(layer=LAYER):
    return layer.init(jax.random.key(1), X)


def train(jit, variables, sizes=(1.0,), spoil=kept, layer=LAYER):
    """Steps that store the state and leave the parameters as they are."""
    for size in sizes:
        variables = jit(jaxfp8.update_state)(
            variables, spoil(gradient(variables, size, layer))
        )
    return variables


@functools.cache
def trained(steps=3, layer=LAYER):
    return train(jax.jit, fresh(layer), range(1, steps + 1), layer=layer)


def once(spoil, steps=3, layer=LAYER):
    """The gradient of one step after some is spoiled."""
    return lambda jit: [
        train(jit, trained(steps, layer), spoil=each, layer=layer)
        for each in (spoil, kept)
    ]


def always(spoil):
    """The gradients of all steps are spoiled."""
    return lambda jit: [
        train(jit, fresh(), (1, 2, 3), spoil) for spoil in (spoil, kept)
    ]


def by(tx, steps, right, sizes=SPIKE):
    """Optax's own loop over all variables and one more step; `right` has the sizes of
    the steps that are right.
    """

    def mistake(jit):
        start = variables = trained(steps) if steps else fresh()
        opt_state = jit(tx.init)(variables)
        for size in sizes:
            updates, opt_state = jit(tx.update)(
                gradient(variables, size), opt_state, variables
            )
            variables = optax.apply_updates(variables, updates)
        return train(jit, variables), train(jit, start, (*right, 1.0))

    return mistake


def microbatches(jit):
    """The mean of one large batch and three small ones."""
    start = trained()
    grads = jax.tree.map(
        lambda *leaves: sum(leaves) / 4, *(gradient(start, size) for size in SPIKE)
    )
    return jit(jaxfp8.update_state)(start, grads), train(jit, start, SPIKE[:1])


def average(jit):
    """Not even the step after the average finds it."""
    averaged = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, fresh(), trained())
    return train(jit, averaged), train(jit, trained())


def each(f):
    return lambda grads: jax.tree.map(f, grads)


def times(factor):
    return each(lambda leaf: leaf * jnp.float32(factor))


def noisy(grads):
    """Noise of 1e-4; the scales are 6e-4 and more."""
    leaves, tree = jax.tree.flatten(grads)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noise = [
        1e-4 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(
        tree, [leaf + part for leaf, part in zip(leaves, noise, strict=True)]
    )


LOUD, UNDONE, BOUNDED, SILENT = "loud", "undone", "bounded", "silent"
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
        by(optax.chain(optax.ema(0.9), STEP), 0, (1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),
    ),
    "stepped by an optimizer from the first step on": (
        LOUD,
        by(optax.adam(1e-3), 0, (1.0,), (1.0,)),
    ),
    "divided by a power of two": (UNDONE, once(times(2.0**-15))),
    "summed over 2, 3, … uses or devices": (BOUNDED, once(times(3))),
    "multiplied by a power of two": (BOUNDED, once(times(2.0**15))),
    "clipped by value from the first step on": (
        SILENT,
        always(each(lambda leaf: jnp.clip(leaf, -1, 1))),
    ),
    "replaced by its sign from the first step on": (SILENT, always(each(jnp.sign))),
    "noise smaller than the scales": (SILENT, once(noisy)),
    "microbatches averaged by hand": (SILENT, microbatches),
    "microbatches averaged by optax": (
        SILENT,
        by(optax.MultiSteps(STEP, 4), 3, SPIKE[:1]),
    ),
    "all variables averaged over steps": (SILENT, average),
    "stepped by an optimizer that adds": (SILENT, by(optax.scale(1e-3), 3, SPIKE)),
    "stepped by SGD once histories are full": (SILENT, by(optax.sgd(1e-6), 6, SPIKE)),
    "multiplied, with a history of length 1": (SILENT, once(times(1 / 3), layer=SHORT)),
}


@pytest.mark.parametrize("jit", [jax.jit, kept], ids=["jit", "eager"])
@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake(mistake, jit):
    kind, make = MISTAKES[mistake]
    if kind != SILENT and jit is not jax.jit:
        with pytest.raises(ValueError, match=f"update_state: .*{STATE}"):
            make(jit)
        return
    after, right = make(jit)
    layer = SHORT if after[OWG][STATE]["input_amax_history"].shape == (1,) else LAYER
    assert bool(jnp.isfinite(layer.apply(after, X)).all()) == (kind != LOUD)
    assert (
        "an optimizer has stepped on it, or under jit"
        in str(jaxfp8.inspect.summary(after))
    ) == (kind == LOUD)
    state = {
        name: (np.asarray(leaf), np.asarray(right[OWG][STATE][name]))
        for name, leaf in after[OWG][STATE].items()
    }
    if kind == UNDONE:
        for leaves in state.values():
            np.testing.assert_array_equal(*leaves)
    if kind == BOUNDED:
        for name, (leaf, true) in state.items():
            slot_0 = int(name.endswith("history"))
            np.testing.assert_array_equal(leaf[slot_0:], true[slot_0:])
            assert leaf[0] >= true[0]
    if kind == SILENT:
        assert any(
            np.abs(leaf - true).max() > 0.05 * np.abs(true).max()
            for leaf, true in state.values()
        )


def test_amaxes_that_the_page_has():
    after, right = (
        variables[OWG][STATE]["input_amax_history"][0]
        for variables in microbatches(jax.jit)
    )
    assert (f"{right:.1f}", f"{after:.1f}") == ("792.7", "204.1")


def test_the_page_has_this_list():
    """A line for each mistake, in this order, with what follows."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "state.md").read_text()
    table = page.split(
        "| what happened to the gradient or the state | what follows |\n|---|---|\n"
    )[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|:]*)[^|]* \| (\w+)", table, re.MULTILINE)
    assert len(rows) == len(table.splitlines())
    assert [(name.strip(), kind) for name, kind in rows] == [
        (name, kind) for name, (kind, _) in MISTAKES.items()
    ]
