"""State: uses that share one, layers that did not run, the same bits from every way to
run, accumulation.
"""

import concurrent.futures
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8

from .libraries import HISTORY, OWG
from .steps import (
    amaxes,
    normal,
    same_bits,
    step_of,
    tally_amaxes,
    tally_state,
    used_state,
)
from .uses import (
    SHARED,
    USES,
    K,
    M,
    N,
    data,
    examples,
    microbatches,
    scan_broadcast,
    twice,
    uses_of,
)
from .verdict import Tally, row


def train(tally, library, loss, grad, steps, what):
    """Slot 0 of every step over the true amax of all uses: the largest ratio; ours has
    the oracle's bits.
    """
    variables = start = library.variables(normal(9, (K, N)))
    state = library.state(variables)
    worst = 1.0
    step = jax.jit(lambda v, x, g: grad(lambda v: loss(library, v, x, g))(v))
    for i in range(steps):
        uses = uses_of(start["params"]["kernel"], *data(i % 8))
        variables = {**start, OWG: step(variables, *data(i % 8))[OWG]}
        state = tally_state(
            tally, library, variables, state, *uses, what=f"{what}: step {i}"
        )
        for operand in amaxes(*uses[0]):
            slot = library.history(variables, operand)[0] / max(
                amaxes(*use)[operand] for use in uses
            )
            worst = max(worst, slot, 1 / max(slot, 1e-30))
    return variables, worst


def shared(library, loss):
    """The plain gradient is measured beside the one that the docs give."""
    tally = Tally()
    _, documented = train(tally, library, loss, library.grad, 3, "documented")
    _, plain = train(Tally(), library, loss, jax.grad, 3, "jax.grad")
    said = f"{documented:.3g} times the true amax, with plain jax.grad {plain:.3g}"
    tally(abs(documented - 1) < 1e-6, said)
    return tally.verdict(said)


@row("a layer called twice: true max", any_layer=True)
def called_twice(library):
    return shared(library, twice)


@row("scan over microbatches", any_layer=True)
def scan_of_microbatches(library):
    return shared(library, microbatches)


@row("nn.scan broadcast")
def scan_that_broadcasts(library):
    return shared(library, scan_broadcast)


@row("vmap over examples", any_layer=True)
def vmap_over_examples(library):
    return shared(library, examples)


def two_hundred_steps(library, grad):
    """The largest entry of the window is that of the data of its steps. A sum doubles
    it each step: inf after 128.
    """
    tally = Tally()
    true = max(np.abs(data(i % 8)[0]).max() for i in range(200 - HISTORY, 200))
    for name, loss in SHARED.items():
        with tally.raising(name):
            variables, _ = train(tally, library, loss, grad, 200, name)
            ratio = library.history(variables, "input").max() / true
            tally(abs(ratio - 1) < 1e-6, f"{name}: {ratio:.3g} times the true amax")
    return tally.verdict("the true amax")


@row("all four stable for 200 steps", "by the documented gradient")
def documented_gradient(library):
    return two_hundred_steps(library, library.grad)


@row("all four stable for 200 steps", "by plain `jax.grad`")
def plain_gradient(library):
    return two_hundred_steps(library, jax.grad)


def unused(library, loss):
    """Two steps in which the layer does not run, then one in which it does: state as it
    was, products right.
    """
    variables = start = library.variables(normal(1, (K, N)), used_state())
    step = jax.jit(jax.grad(loss))
    tally = Tally()
    variables = library.update(variables, step(variables))
    variables = library.update(variables, step(variables))
    scale = float(variables[OWG][library.module]["input_scale"][0])
    tally(
        same_bits(variables[OWG], start[OWG]),
        f"history {library.history(variables, 'input')}, scale {scale:g}",
    )
    is_finite = step_of(library, N)(
        variables, normal(3, (M, K)), normal(4, (M, N))
    ).is_finite
    tally(is_finite, "its next products are not finite")
    return tally.verdict()


@row("cond branch not taken", any_layer=True)
def branch_not_taken(library):
    layer = library.dense(N)
    x = normal(0, (M, K))

    def loss(v):
        return jax.lax.cond(
            x[0, 0] > 1e9,
            lambda: jnp.sum(layer.apply(v, x) ** 2),
            lambda: jnp.float32(0),
        )

    return unused(library, loss)


@row("unused expert", any_layer=True)
def unused_expert(library):
    return unused(library, lambda v: jnp.float32(1) * jnp.sum(v["params"]["kernel"]))


@row("frozen layer", any_layer=True)
def frozen_layer(library):
    layer = library.dense(N)
    x = normal(0, (M, K))
    return unused(library, lambda v: jnp.sum(layer.apply(jax.lax.stop_gradient(v), x)))


@row("jit = eager = second run = donated, bitwise", any_layer=True)
def same_from_every_way(library):
    layer = library.dense(20, dtype=jnp.bfloat16)
    tally = Tally()
    x = normal(1, (48, 36), dtype=jnp.bfloat16)
    g = normal(2, (48, 20), dtype=jnp.bfloat16)
    variables = library.variables(normal(0, (36, 20)), used_state())

    def step(variables, x, g):
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, vjp(g)

    jitted = jax.jit(step)
    expected = jax.tree.map(np.asarray, jitted(variables, x, g))
    given = jax.tree.map(jnp.array, variables)
    for what, run, first in (
        ("a second run", jitted, variables),
        ("eager", step, variables),
        ("compiled again", jax.jit(lambda *args: step(*args)), variables),
        ("donation", jax.jit(step, donate_argnums=0), given),
    ):
        tally(same_bits(run(first, x, g), expected), f"{what} gives other bits")
    tally(
        any(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "no buffer was taken"
    )
    return tally.verdict("the same bits")


@row("two threads call one jitted function", any_layer=True)
def two_threads(library):
    """Each trains on its own data and ends in the bits of a run alone, where both trace
    one function at once and give their state away, and where each has a function.
    """
    tally = Tally()

    def run(step, thread, barrier):
        variables = jax.tree.map(jnp.array, library.variables(normal(thread, (K, N))))
        for i in range(12):
            barrier.wait(timeout=60)
            got = step(variables, *(v[i % USES] for v in data(20 * thread + i)))
            variables = got.variables
        return got

    shared = step_of(library, N, donate=True)
    for what, steps in {
        "one function": [shared, shared],
        "a function each": [step_of(library, N, donate=True) for _ in range(2)],
    }.items():
        alone = [run(step, i, threading.Barrier(1)) for i, step in enumerate(steps)]
        jax.clear_caches()
        barriers = [threading.Barrier(2)] * 2
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            together = list(pool.map(run, steps, range(2), barriers, timeout=120))
        for i in range(2):
            same = same_bits(together[i], alone[i])
            tally(same, f"{what}: thread {i} has other bits than alone")
    return tally.verdict("the bits of a run alone")


def accumulated(library, total):
    """Slot 0 after one optimizer step is the largest amax of its microbatches."""
    tally = Tally()
    variables = library.variables(normal(9, (K, N)))
    for i in range(3):
        x, g = data(i)
        after = library.update(variables, total(variables, x, g))
        state = library.state(variables)
        kernel = variables["params"]["kernel"]
        tally_amaxes(tally, library, after, (x, kernel, g))
        tally_state(
            tally, library, after, state, *uses_of(kernel, x, g), what=f"step {i}"
        )
        variables = after
    return tally.verdict("the true amax")


def _of_one(library):
    def one(variables, x, g):
        return jax.grad(lambda v: jnp.vdot(library.dense(N).apply(v, x), g))(variables)

    return jax.jit(one)


def _add(library):
    """With Flax the trees of gradients are added, as there is nothing else to call."""
    return (
        jaxfp8.accumulate_gradients
        if library.is_ours
        else lambda a, b: jax.tree.map(jnp.add, a, b)
    )


@row("gradient accumulation", "by a Python loop", any_layer=True)
def accumulation_in_a_loop(library):
    one = _of_one(library)
    add = _add(library)

    def total(variables, x, g):
        return functools.reduce(add, [one(variables, x[i], g[i]) for i in range(USES)])

    return accumulated(library, total)


@row("gradient accumulation", "by scan", any_layer=True)
def accumulation_in_a_scan(library):
    one = _of_one(library)
    add = _add(library)

    @jax.jit
    def total(variables, x, g):
        zeros = jax.tree.map(jnp.zeros_like, variables)
        return jax.lax.scan(
            lambda acc, use: (add(acc, one(variables, *use)), None), zeros, (x, g)
        )[0]

    return accumulated(library, total)
