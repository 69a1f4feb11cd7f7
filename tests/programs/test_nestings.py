"""Random nestings of loops and transformations over the uses of one layer: the oracle's
value, gradients and state.
"""

import functools

import jax
import jax.numpy as jnp
import oracle
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from jax import lax

from programs import functional, known_amax

# Compilation is most of the time: few examples here, many in the slow test.
SETTINGS = {
    "derandomize": True,
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}


def branch(use):
    """A branch that is taken; the other one uses the layer as well."""
    return lambda *args: lax.cond(
        jnp.bool_(True), use, lambda *args: 2 * use(*args), *args
    )


def not_taken(use):
    """The use, plus a branch with the same layer that is not taken."""
    return lambda *args: (
        use(*args) + lax.cond(jnp.bool_(False), use, lambda *_: jnp.float32(0), *args)
    )


LOOPS = (
    functional.loop,
    functional.scan,
    functional.vmap,
    functional.fori_loop,
    functional.map_in_batches,
)
TRANSFORMATIONS = (
    jax.jit,
    jax.checkpoint,
    branch,
    not_taken,
    *functional.POLICIES.values(),
)


def closed(transformation):
    """A transformation of a use that closes over its layer, so that plain `jax.grad` is
    right.
    """
    return lambda use: (
        lambda layer, *args: transformation(functools.partial(use, layer))(*args)
    )


def level(loop, transformations):
    """A loop over uses, each of them transformed."""
    return lambda use, *args: loop(
        functools.reduce(lambda use, wrap: wrap(use), transformations, use), *args
    )


@st.composite
def programs(draw, depth=3):
    """`(program, differentiate)`: levels of loops, whose halves are loops again; or
    layers with states of their own.
    """
    is_closed = draw(st.booleans())
    wrap = closed if is_closed else lambda transformation: transformation

    def drawn(loops):
        some = draw(st.lists(st.sampled_from(TRANSFORMATIONS), max_size=2))
        return level(
            draw(st.sampled_from(loops)),
            [wrap(transformation) for transformation in some],
        )

    if draw(st.integers(0, 3)) == 0:
        run = drawn((functional.layers_in_a_scan, functional.members(0, 0)))
        own = known_amax.OWN
    else:
        run, own = drawn(LOOPS), ()
        for _ in range(draw(st.integers(0, depth - 1))):
            run = functional.nested(drawn(LOOPS), run)
    entries = [jax.value_and_grad] * is_closed + [functional.max_grad] * (not own)
    differentiate = draw(st.sampled_from([*entries, functional.jaxfp8.value_and_grad]))
    return known_amax.Program(run, own=own), differentiate


def check(program, seed):
    """The recipe and the dtype of a seed; one in four runs without jit."""
    program, differentiate = program
    recipe = known_amax.RECIPES[("delayed", "most_recent", "margin")[seed % 3]]
    options = {
        "differentiate": differentiate,
        "dtype": oracle.BF16 if seed % 5 == 0 else jnp.float32,
    }
    known_amax.check(
        functional.Functional, program, recipe, jit=seed % 4 > 0, **options
    )


@settings(max_examples=4, **SETTINGS)
@given(programs(), st.integers(0, 2**16))
def test_random_programs(program, seed):
    check(program, seed)


@pytest.mark.slow
@settings(max_examples=100, **SETTINGS)
@given(programs(), st.integers(0, 2**16))
def test_many_random_programs(program, seed):
    check(program, seed)
