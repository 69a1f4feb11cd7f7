"""State: uses that share one, layers that did not run, the same bits from every way to run, accumulation."""

import concurrent.futures
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfp8

from .libraries import HISTORY, OWG
from .steps import amaxes, is_clean, normal, same_bits, step_of, used_state
from .verdict import Tally, row

M, K, N, USES = 6, 8, 5, 4


def data(step):
    """x `[USES, M, K]` and grad `[USES, M, N]` of sizes that differ from use to use."""
    sizes = 2.0 ** np.random.default_rng(step).permutation(USES)
    x = normal(2 * step, (USES, M, K)) * sizes[:, None, None].astype(np.float32)
    return x, normal(2 * step + 1, (USES, M, N)) * sizes[::-1, None, None].astype(np.float32)


def twice(library, variables, x, grad):
    layer = library.dense(N).bind(variables)
    return sum(jnp.vdot(layer(x[i]), grad[i]) for i in range(USES))


def microbatches(library, variables, x, grad):
    def body(total, use):
        return total + jnp.vdot(library.dense(N).apply(variables, use[0]), use[1]), None

    return jax.lax.scan(body, jnp.float32(0), (x, grad))[0]


def scan_broadcast(library, variables, x, grad):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, total, use):
            return total + jnp.vdot(library.dense(N, name="layer")(use[0]), use[1]), None

    scan = nn.scan(Body, variable_broadcast=["params", OWG], split_rngs={"params": False})()
    nested = {collection: {"layer": variables[collection]} for collection in variables}
    return scan.apply(nested, jnp.float32(0), (x, grad))[0]


def examples(library, variables, x, grad):
    def one(x, grad):
        return jnp.vdot(library.dense(N).apply(variables, x), grad)

    return jnp.sum(jax.vmap(one)(x, grad))


SHARED = {
    "a layer called twice": twice,
    "scan over microbatches": microbatches,
    "nn.scan broadcast": scan_broadcast,
    "vmap over examples": examples,
}


def shared(library, loss, steps=3):
    """Slot 0 after each step is the largest amax of all uses; the plain gradient is measured beside it.

    The largest ratio over operands and steps, to the true amax, with the documented gradient and with `jax.grad`.
    """
    tally, ratios = Tally(), {}
    for name, grad in (("documented", library.grad), ("jax.grad", jax.grad)):
        variables, worst = library.variables(normal(9, (K, N))), 1.0
        step = jax.jit(lambda v, x, g, grad=grad: grad(lambda v: loss(library, v, x, g))(v))
        for i in range(steps):
            x, g = data(i)
            after = step(variables, x, g)
            for operand, true in amaxes(x, variables["params"]["kernel"], g).items():
                slot = library.history(after, operand)[0] / true
                worst = max(worst, slot, 1 / max(slot, 1e-30))
            variables = {"params": variables["params"], OWG: after[OWG]}
        ratios[name] = worst
    said = f"{ratios['documented']:.3g} times the true amax, with plain jax.grad {ratios['jax.grad']:.3g}"
    tally(abs(ratios["documented"] - 1) < 1e-6, said)
    return tally.verdict(said)


@row("a layer called twice: true max")
def called_twice(library):
    return shared(library, twice)


@row("scan over microbatches")
def scan_of_microbatches(library):
    return shared(library, microbatches)


@row("nn.scan broadcast")
def scan_that_broadcasts(library):
    return shared(library, scan_broadcast)


@row("vmap over examples")
def vmap_over_examples(library):
    return shared(library, examples)


def two_hundred_steps(library, grad):
    """The largest entry of a window of 4 is that of the data of the last four steps."""
    tally = Tally()
    true = max(np.abs(data(i % 8)[0]).max() for i in range(200 - HISTORY, 200))
    for name, loss in SHARED.items():
        variables = library.variables(normal(9, (K, N)))
        step = jax.jit(lambda v, x, g, loss=loss: grad(lambda v: loss(library, v, x, g))(v))
        with tally.raising(name):
            for i in range(200):
                variables = {"params": variables["params"], OWG: step(variables, *data(i % 8))[OWG]}
            ratio = library.history(variables, "input").max() / true
            tally(abs(ratio - 1) < 1e-6, f"{name}: {ratio:.3g} times the true amax")
    return tally.verdict("the true amax")


@row("all four stable for 200 steps", "by the gradient that the docs give for shared state")
def documented_gradient(library):
    return two_hundred_steps(library, library.grad)


@row("all four stable for 200 steps", "by plain `jax.grad`")
def plain_gradient(library):
    return two_hundred_steps(library, jax.grad)


@row("ensemble vmap: one state a member")
def ensemble(library):
    layer, members, tally = library.dense(N), 3, Tally()
    each = [library.variables(normal(i, (K, N)), used_state()) for i in range(members)]
    x, g = (np.stack([v[i] for i in range(members)]) for v in data(0))

    def gradient(v, x, g):
        return jax.grad(lambda v: jnp.vdot(layer.apply(v, x), g))(v)

    together = jax.jit(jax.vmap(gradient))(jax.tree.map(lambda *v: jnp.stack(v), *each), x, g)
    for i in range(members):
        alone = jax.jit(gradient)(each[i], x[i], g[i])
        own = jax.tree.map(lambda leaf, i=i: leaf[i], together[OWG])
        tally(same_bits(own, alone[OWG]), f"member {i} has not its own state")
    return tally.verdict()


def unused(library, loss):
    """Two steps in which the layer does not run, then one in which it does: state as it was, products right."""
    variables = start = library.variables(normal(1, (K, N)), used_state())
    step, tally = jax.jit(jax.grad(loss)), Tally()
    for _ in range(2):
        variables = library.update(variables, step(variables))
    scale = float(variables[OWG][library.module]["input_scale"][0])
    tally(same_bits(variables[OWG], start[OWG]), f"history {library.history(variables, 'input')}, scale {scale:g}")
    x, g = normal(3, (M, K)), normal(4, (M, N))
    got = step_of(library, N)(variables, x, g)
    tally(all(np.isfinite(p).all() for p in got[:3]), "its next products are not finite")
    return tally.verdict()


@row("cond branch not taken")
def branch_not_taken(library):
    layer, x = library.dense(N), normal(0, (M, K))

    def loss(v):
        return jax.lax.cond(x[0, 0] > 1e9, lambda: jnp.sum(layer.apply(v, x) ** 2), lambda: jnp.float32(0))

    return unused(library, loss)


@row("unused expert")
def unused_expert(library):
    return unused(library, lambda v: jnp.float32(1) * jnp.sum(v["params"]["kernel"]))


@row("frozen layer")
def frozen_layer(library):
    layer, x = library.dense(N), normal(0, (M, K))
    return unused(library, lambda v: jnp.sum(layer.apply(jax.lax.stop_gradient(v), x)))


@row("remat: one update, bitwise as without")
def remat(library):
    variables, x, g, tally = library.variables(normal(1, (K, N)), used_state()), *(v[0] for v in data(0)), Tally()

    def gradient(module):
        return jax.jit(library.grad(lambda v: jnp.vdot(module.apply(v, x), g)))(variables)

    plain = library.dense(N)
    fields = {name: getattr(plain, name) for name in ("features", "use_bias", "dot_general_cls")}
    tally(same_bits(gradient(nn.remat(nn.Dense)(**fields)), gradient(plain)), "other bits")
    return tally.verdict("the same bits")


@row("jit = eager = second run = donated, bitwise")
def same_from_every_way(library):
    layer, tally = library.dense(20, dtype=jnp.bfloat16), Tally()
    x, g = normal(1, (48, 36), dtype=jnp.bfloat16), normal(2, (48, 20), dtype=jnp.bfloat16)
    variables = library.variables(normal(0, (36, 20)), used_state())

    def step(variables, x, g):
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, vjp(g)

    jitted = jax.jit(step)
    expected = jax.tree.map(np.asarray, jitted(variables, x, g))
    tally(same_bits(jitted(variables, x, g), expected), "a second run gives other bits")
    tally(same_bits(step(variables, x, g), expected), "eager gives other bits than jit")
    given = jax.tree.map(jnp.array, variables)
    tally(same_bits(jax.jit(step, donate_argnums=0)(given, x, g), expected), "donation gives other bits")
    return tally.verdict("the same bits")


@row("two threads call one jitted function")
def two_threads(library):
    step, tally = step_of(library, N), Tally()

    def run(thread, barrier=None):
        variables = library.variables(normal(thread, (K, N)))
        for i in range(20):
            if barrier:
                barrier.wait(timeout=60)
            variables = step(variables, *(v[i % USES] for v in data(20 * thread + i))).variables
        return variables

    alone, barrier = [run(0), run(1)], threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, thread, barrier) for thread in range(2)]
        for thread, future in enumerate(futures):
            tally(same_bits(future.result(timeout=120), alone[thread]), f"thread {thread} has other bits than alone")
    return tally.verdict("the bits of a run alone")


def accumulated(library, total):
    """Slot 0 after one optimizer step is the largest amax of its microbatches."""
    tally, variables = Tally(), library.variables(normal(9, (K, N)))
    for i in range(3):
        x, g = data(i)
        after = library.update(variables, total(variables, x, g))
        for operand, true in amaxes(x, variables["params"]["kernel"], g).items():
            slot = library.history(after, operand)[0]
            tally(abs(slot / true - 1) < 1e-6, f"{operand}: {slot / true:.3g} times the true amax")
        variables = after
    return tally.verdict("the true amax")


def _of_one(library):
    def one(variables, x, g):
        return jax.grad(lambda v: jnp.vdot(library.dense(N).apply(v, x), g))(variables)

    return jax.jit(one)


@row("gradient accumulation by scan, by a Python loop", "by a Python loop")
def accumulation_in_a_loop(library):
    """With Flax the trees of gradients are added, as there is nothing else to call."""
    one = _of_one(library)
    add = jaxfp8.accumulate_gradients if library.is_ours else lambda a, b: jax.tree.map(jnp.add, a, b)

    def total(variables, x, g):
        acc = one(variables, x[0], g[0])
        for i in range(1, USES):
            acc = add(acc, one(variables, x[i], g[i]))
        return acc

    return accumulated(library, total)


@row("gradient accumulation by scan, by a Python loop", "by scan")
def accumulation_in_a_scan(library):
    one = _of_one(library)
    add = jaxfp8.accumulate_gradients if library.is_ours else lambda a, b: jax.tree.map(jnp.add, a, b)

    @jax.jit
    def total(variables, x, g):
        zeros = jax.tree.map(jnp.zeros_like, variables)
        return jax.lax.scan(lambda acc, use: (add(acc, one(variables, *use)), None), zeros, (x, g))[0]

    return accumulated(library, total)


@row("gradient accumulation by optax.MultiSteps")
def multi_steps(library):
    """After a step of four microbatches the window holds their largest amax, and products are finite."""
    tally, tx = Tally(), optax.MultiSteps(optax.sgd(1e-3), USES)
    train = library.train_state.create(
        apply_fn=library.dense(N, 2 * USES).apply,
        params=library.variables(normal(9, (K, N)), history=2 * USES),
        tx=tx,
    )

    @jax.jit
    def step(train, x, g):
        return train.apply_gradients(grads=jax.grad(lambda v: jnp.vdot(train.apply_fn(v, x), g))(train.params))

    x, g = data(1)
    for i in range(USES):
        train = step(train, x[i], g[i])
    for operand, true in amaxes(x, normal(9, (K, N)), g).items():
        top = library.history(train.params, operand).max()
        tally(abs(top / true - 1) < 1e-6, f"{operand}: {top / true:.3g} times the true amax")
    tally(is_clean(train.params), "state is not finite")
    return tally.verdict("the true amax")
