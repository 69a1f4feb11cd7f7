"""update_state: what was not used, summed or scaled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8.inspect import without_counters

from .counter_cases import OPERANDS, OWG, RECIPE, assert_counters, counted_state, of_state, structure, tensors, use


def test_what_was_not_used_stays():
    (x,), kernel, (grad,) = tensors(11)
    state = counted_state()
    new = jax.grad(use, argnums=1)(kernel, state, x, grad)
    without = jaxfp8.update_state(without_counters(state), new)
    assert structure(without) == structure(jaxfp8.init_state(RECIPE))
    state = jaxfp8.update_state(state, new)
    for new in (jax.tree.map(jnp.zeros_like, state), jax.tree.map(lambda leaf: leaf * np.nan, state)):
        after = jaxfp8.update_state(state, new)
        assert_counters(of_state(after), {name: np.asarray(of_state(state)(name)) for name in OPERANDS}, "not used")
    # A gradient that knows of no counters, from a program of before, says nothing about them.
    before, after = (
        nested(tree) for tree in (state, without_counters(jax.grad(use, argnums=1)(kernel, state, x, grad)))
    )
    after = jaxfp8.update_state(before, after)
    oracle.assert_bitwise(after[OWG]["a"]["input_counters"], np.asarray(state.input.counters), "kept")
    assert not np.array_equal(after[OWG]["a"]["input_amax_history"], state.input.amax_history)


def nested(state):
    leaves = {
        f"{name}_{field.name}": getattr(getattr(state, name), field.name)
        for name in OPERANDS
        for field in dataclasses.fields(state.input)
    }
    return {OWG: {"a": {name: leaf for name, leaf in leaves.items() if leaf is not None}}}


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_what_was_summed_or_scaled_is_undone(factor):
    """As the scale is: under a trace, where nobody can be told. Outside it raises."""
    (x,), kernel, (grad,) = tensors(12)
    state = counted_state()
    for _ in range(2):
        new = jax.grad(use, argnums=1)(kernel, state, x, grad)
        state, before = jaxfp8.update_state(state, new), state
    changed = jax.tree.map(lambda leaf: leaf * np.float32(factor), new)
    after = jax.jit(jaxfp8.update_state)(before, changed)
    for name in OPERANDS:
        # A product and a quotient of f32: two roundings, and one of the factor that is found.
        np.testing.assert_allclose(of_state(after)(name), of_state(state)(name), rtol=3 * 2.0**-23)
    with pytest.raises(ValueError, match="update_state"):
        jaxfp8.update_state(before, changed)
