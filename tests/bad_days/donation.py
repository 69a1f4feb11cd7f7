"""State and gradients that are given away: no array stays, and a sum has one buffer."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8

from .libraries import OWG
from .steps import normal, same_bits, step_of, used_state


def donated_loop(tally, library):
    """Twenty steps: no array of an earlier step is alive, in the loop or after it."""
    step = step_of(library, 20, donate=True)
    variables = jax.tree.map(jnp.array, library.variables(normal(0, (36, 20))))
    x, grad = jnp.asarray(normal(1, (48, 36))), jnp.asarray(normal(2, (48, 20)))
    old, alive = [], []
    for _ in range(20):
        old += [weakref.ref(leaf) for leaf in jax.tree.leaves(variables)]
        variables = step(variables, x, grad).variables
        alive.append(len(jax.live_arrays()))
    tally(len(set(alive[2:])) == 1, f"arrays alive: {alive}")
    gc.collect()
    tally(not any(leaf() is not None for leaf in old), "an array of an earlier step is alive")


def donated_accumulation(tally, library):
    """The sum so far is given away in each of four microbatches: bitwise as without, and one buffer for all of them."""
    layer, variables = library.dense(20), library.variables(normal(0, (36, 20)), used_state())
    batches = [(normal(2 * i, (48, 36), 2.0**i), normal(2 * i + 1, (48, 20))) for i in range(4)]

    def accumulate(acc, x, grad):
        return jaxfp8.accumulate_gradients(acc, jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad))(variables))

    def total(step):
        acc, places, given = jax.tree.map(jnp.zeros_like, variables), set(), None
        for x, grad in batches:
            given, acc = acc, step(acc, x, grad)
            places.add(acc["params"]["kernel"].unsafe_buffer_pointer())
        return acc, given, places

    expected, *_ = total(jax.jit(accumulate))
    acc, given, places = total(jax.jit(accumulate, donate_argnums=0))
    tally(same_bits(acc, expected), "donated accumulation gives other bits")
    tally(all(leaf.is_deleted() for leaf in jax.tree.leaves(given)) and len(places) == 1, "not the same buffers")
    tally(library.history(acc, "input")[0] == max(np.abs(x).max() for x, _ in batches), "not the largest amax")
    tally(same_bits(library.update(variables, acc)[OWG], acc[OWG]), "more than one step of the state")
