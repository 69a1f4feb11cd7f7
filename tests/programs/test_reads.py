"""A state of delayed scaling is read once and written once in a step, however many
products use it, and wherever they are.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
from numpy.testing import assert_array_equal
from parametrize import each_row

import jaxfp8
from jaxfp8._jax import _compat
from programs.cases import MATMUL, stacked

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
AMAXES = (2.0, 9.0, 5.0)
XS = jnp.stack([jnp.full((4, 16), amax) for amax in AMAXES])


def layer(x, state):
    kernel = jnp.ones((16, 16))
    return jaxfp8.dot_general(x, kernel, MATMUL, recipe=RECIPE, state=state).sum()


def three_calls(state):
    return sum(layer(x, state) for x in XS)


def over(f):
    """Scan `f` over XS."""
    return lambda state: jax.lax.scan(lambda c, x: (c + f(x, state), None), 0.0, XS)[0]


def branch(x, state):
    return jax.lax.cond(x[0, 0] > 3, lambda x: layer(x, state), jnp.sum, x)


def scan_in_a_scan(state):
    def row(x, state):
        return over(layer)(state) * x[0, 0]

    return over(row)(state)


PROGRAMS = {
    "three calls": three_calls,
    "jit": lambda state: sum(jax.jit(lambda x: layer(x, state))(x) for x in XS),
    "remat": lambda state: sum(
        jax.checkpoint(lambda x: layer(x, state))(x) for x in XS
    ),
    "scan": over(layer),
    "scan of remat": over(
        lambda x, state: jax.checkpoint(lambda x: layer(x, state))(x)
    ),
    "branch in a scan": over(branch),
    "scan in a scan": scan_in_a_scan,
    "vmap": lambda state: jax.vmap(lambda x: layer(x, state))(XS).sum(),
}
GRADIENTS = {
    "jax.grad": jax.grad,
    "jaxfp8.grad": jaxfp8.grad,
    "of a jit": lambda program: jax.grad(lambda s: jax.jit(program)(s)),
}


def equations(jaxpr, names, times=1):
    """How often a step runs a primitive whose name ends with one of `names`."""
    count = 0
    for e in jaxpr.eqns:
        count += times * e.primitive.name.endswith(names)
        length = times * e.params.get("length", 1) if e.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(
            list(e.params.values()),
            is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                count += equations(inner, names, length)
    return count


def reads_and_writes(step, state=None):
    state = jaxfp8.init_state(RECIPE) if state is None else state
    jaxpr = jax.make_jaxpr(step)(state).jaxpr
    reads = equations(jaxpr, ("delayed_scales", "read_histories"))
    return [reads, equations(jaxpr, "write_histories")]


@each_row("gradient", GRADIENTS)
@each_row("program", PROGRAMS)
def test_once(program, gradient):
    step = gradient(program)
    state = jaxfp8.init_state(RECIPE)
    assert reads_and_writes(step) == [1, 1]
    for run in (step, jax.jit(step)):
        next_state = run(state)
        assert_array_equal(next_state.input.amax_history, [9, 0, 0, 0])
        assert_array_equal(next_state.kernel.amax_history, [1, 0, 0, 0])


@each_row("gradient", GRADIENTS)
def test_states_of_stages(gradient):
    """As a pipeline does: each tick runs all stages, each with a state of its own."""
    stages = jax.vmap(layer, in_axes=(None, 0))
    step = gradient(over(lambda x, states: stages(x, states).sum()))
    states = stacked(jaxfp8.init_state(RECIPE), 2)
    assert reads_and_writes(step, states) == [1, 1]
    next_state = step(states)
    assert_array_equal(next_state.input.amax_history, [[9, 0, 0, 0]] * 2)


def test_a_state_of_two_recipes():
    """Each recipe reads the state; what they record combines by max."""
    margin = jaxfp8.DelayedScaling(amax_history_len=4, margin=1)

    def loss(state):
        kernel = jnp.ones((16, 16))
        recipes = RECIPE, margin, RECIPE
        return sum(
            jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state).sum()
            for x, recipe in zip(XS, recipes, strict=True)
        )

    assert reads_and_writes(jax.grad(loss)) == [2, 2]
    next_state = jax.grad(loss)(jaxfp8.init_state(RECIPE))
    assert next_state.input.amax_history[0] == 9


def test_the_gradient_of_a_history_alone():
    """Its scale is no part of the gradient: the read is where its product is."""
    state = jaxfp8.init_state(RECIPE)

    def loss(history):
        of_input = dataclasses.replace(state.input, amax_history=history)
        return three_calls(dataclasses.replace(state, input=of_input))

    for step in (jax.grad(loss), jax.jit(jax.grad(loss))):
        next_history = step(state.input.amax_history)
        assert_array_equal(next_history, [9, 0, 0, 0])


def test_nothing_is_kept():
    """No trace outlives its gradient, and the memo is empty after it."""
    before = len(_compat.known_results)
    with jax.checking_leaks():
        for program in PROGRAMS.values():
            jax.jit(jax.grad(program))(jaxfp8.init_state(RECIPE))
    gc.collect()
    assert len(_compat.known_results) <= before
