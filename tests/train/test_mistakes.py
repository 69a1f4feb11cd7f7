"""Each line of docs/state.md's list of mistakes: what is loud, what is undone or bounded, and what is silent."""

import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8

OWG = "_overwrite_with_gradient"
LAYER = nn.Dense(4, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(recipe=jaxfp8.DelayedScaling(amax_history_len=4)))
SHORT = nn.Dense(4, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(recipe=jaxfp8.DelayedScaling(amax_history_len=1)))
X = jax.random.normal(jax.random.key(0), (8, 16)) * 3
STATE = "Fp8DotGeneral_0"

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")


def gradient(variables, x=X, layer=LAYER):
    return jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2)))(variables)


def trained(layer=LAYER, steps=3, spoil=lambda grads: grads):
    variables = layer.init(jax.random.key(1), X)
    for i in range(steps):
        variables = jax.jit(jaxfp8.update_state)(variables, spoil(gradient(variables, X * (1 + i), layer)))
    return variables


def times(factor, grads):
    return jax.tree.map(lambda leaf: leaf * jnp.float32(factor), grads)


def stepped_on(variables):
    updates, _ = optax.adam(10.0).update(gradient(variables), optax.adam(10.0).init(variables))
    return optax.apply_updates(variables, updates), gradient(variables)


def microbatches(variables):
    """Of one large batch and three small ones, the mean."""
    grads = [gradient(variables, X * size) for size in (100.0, 1.0, 1.0, 1.0)]
    return variables, jax.tree.map(lambda *leaves: sum(leaves) / 4, *grads)


def of_another_step(variables):
    return variables, gradient(trained(steps=1))


LOUD, UNDONE, BOUNDED, SILENT = "loud", "undone", "bounded", "silent"
# The first words of a line of the page -> what follows, and a function from variables to what `update_state` gets.
MISTAKES = {
    "clipped as a whole": (LOUD, lambda v: (v, optax.clip_by_global_norm(0.37).update(gradient(v), None)[0])),
    "averaged over fewer than all": (LOUD, lambda v: (v, times(1 / 3, gradient(v)))),
    "of another step": (LOUD, of_another_step),
    "stepped by an optimizer": (LOUD, stepped_on),
    "multiplied by a power of two": (UNDONE, lambda v: (v, times(2.0**-7, gradient(v)))),
    "summed over 2, 3, … uses or devices": (BOUNDED, lambda v: (v, times(3, gradient(v)))),
    "clipped by value": (SILENT, None),
    "microbatches averaged by hand": (SILENT, microbatches),
    "all variables averaged over steps": (SILENT, None),
    "multiplied, with a history of length 1": (SILENT, None),
}


def newest(variables):
    return float(variables[OWG][STATE]["input_amax_history"][0])


@pytest.mark.parametrize("mistake", [name for name, (_, make) in MISTAKES.items() if make])
def test_a_mistake(mistake):
    kind, make = MISTAKES[mistake]
    variables = trained()
    old, grads = make(variables)
    after = jax.jit(jaxfp8.update_state)(old, grads)
    right = jaxfp8.update_state(variables, gradient(variables))
    if kind == SILENT:
        assert newest(jaxfp8.update_state(old, grads)) < 0.5 * float(jnp.max(jnp.abs(X * 100)))
        assert jnp.isfinite(LAYER.apply(after, X)).all()
        return
    with pytest.raises(ValueError, match=f"update_state: .*{STATE}"):
        jaxfp8.update_state(old, grads)
    assert bool(jnp.isnan(LAYER.apply(after, X)).any()) == (kind == LOUD)
    if kind == LOUD:
        assert "an optimizer has stepped on it, or under jit" in str(jaxfp8.inspect.summary(after))
    if kind == UNDONE:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-20), after[OWG], right[OWG])
    if kind == BOUNDED:
        assert newest(after) >= newest(right)


def test_clips_by_value_from_the_first_step_on():
    variables = trained(spoil=lambda grads: jax.tree.map(lambda leaf: jnp.clip(leaf, -1, 1), grads))
    assert newest(variables) == 1 < jnp.max(jnp.abs(X)) and jnp.isfinite(LAYER.apply(variables, X)).all()


def test_an_average_of_all_variables():
    old = LAYER.init(jax.random.key(1), X)
    average = jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, old, trained())
    assert newest(jaxfp8.update_state(average, gradient(average))) > 0  # not even the next step finds it
    assert newest(average) < 0.1 * jnp.max(jnp.abs(X))


def test_a_history_of_length_1():
    variables = trained(SHORT)
    after = jaxfp8.update_state(variables, times(1 / 3, gradient(variables, layer=SHORT)))
    assert newest(after) < 0.5 * jnp.max(jnp.abs(X)) and jnp.isfinite(SHORT.apply(after, X)).all()


def test_the_page_has_this_list():
    """A line for each mistake, in this order, with what follows."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "state.md").read_text()
    table = page.split("| what happened to the gradient or the state | what follows |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]*) \| (\w+)", table, re.MULTILINE)
    assert [kind for _, kind in rows] == [kind for kind, _ in MISTAKES.values()]
    assert all(line.startswith(name) for (line, _), name in zip(rows, MISTAKES, strict=True))
