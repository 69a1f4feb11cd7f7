"""State: two hundred steps of every shared use, layers that did not run, the same bits from every way to run."""

import concurrent.futures
import functools
import gc
import threading
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs.known_amax import check
from programs.linen import PROGRAMS, Linen
from train import replay

import jaxfp8

from .cases import OWG, assert_same_bits, dense, normal, step_of, used_state, variables_of

STEPS, USES = 200, 4

# ---------------------------------------------------------------------------------------------------- two hundred steps


@pytest.mark.parametrize("program", ["called", "scan"], ids=["layer called twice", "nn.scan broadcast"])
def test_two_hundred_steps_of_a_module(program):
    """The true max, bitwise at every step. A sum doubles a window of 1024 each step: inf after 128 of them."""
    check(Linen, PROGRAMS[program], differentiate=jax.value_and_grad, steps=STEPS)


AROUND = {
    "scan over microbatches": lambda loss, x, grad: jax.lax.scan(
        lambda total, use: (total + loss(*use), None), jnp.float32(0), (x, grad)
    )[0],
    "vmap over examples": lambda loss, x, grad: jnp.sum(jax.vmap(loss)(x, grad)),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_two_hundred_steps_around_a_layer(around):
    """Four uses a step, with sizes that change: the window must follow them down as well as up."""

    @jax.jit
    def advance(variables, x, grad):
        def loss(variables):
            return around(functools.partial(replay.loss, variables), x, grad)

        gradient = jax.grad(loss)(variables)
        kernel = variables["params"]["kernel"] - 1e-3 * gradient["params"]["kernel"]
        return {"params": {"kernel": kernel}, OWG: gradient[OWG]}

    variables, state = replay.variables(), replay.first()
    for i in range(STEPS):
        batches, kernel = [replay.batch(USES * i + j) for j in range(USES)], replay.kernel_of(variables)
        variables = advance(variables, *map(np.stack, zip(*batches, strict=True)))
        state = replay.step(state, kernel, batches)
        replay.assert_state(variables, state, f"step {i}")
        assert np.isfinite(variables["params"]["kernel"]).all()


# ---------------------------------------------------------------------------------------------- layers that did not run

FP8 = functools.partial(nn.Dense, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral)


class Experts(nn.Module):
    """One of three layers by an index that is known on the device only; with index 3 none of them."""

    @nn.compact
    def __call__(self, x, index):
        experts = [FP8(5, name=f"expert_{i}") for i in range(3)]
        if self.is_initializing():
            return sum(expert(x) for expert in experts)
        branches = [lambda module, x, i=i: experts[i](x) for i in range(3)]
        return nn.switch(index, [*branches, lambda module, x: jnp.zeros((len(x), 5))], self, x)


@jax.jit
def train_experts(state, x, index):
    grads = jax.grad(lambda variables: jnp.sum(state.apply_fn(variables, x, index) ** 2))(state.params)
    return state.apply_gradients(grads=grads)


def test_unused_experts_and_branches_not_taken():
    """State of what did not run stays to the bit, step after step. Flax stores scale 0, and x / 0 next time."""
    model, x = Experts(), normal(0, (6, 8))
    state = jaxfp8.linen.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), x, 0), tx=optax.sgd(0.01)
    )
    for step, index in enumerate((0, 2, 0, 3, 2, 0)):  # never 1
        before, state = state.params[OWG], train_experts(state, x * (1 + step), index)
        for i in range(3):
            name = f"expert_{i}"
            if i == index:
                history = state.params[OWG][name]["Fp8DotGeneral_0"]["input_amax_history"]
                assert history[0] == np.abs(x * (1 + step)).max(), f"step {step}: expert {i} ran"
            else:
                assert_same_bits(state.params[OWG][name], before[name], f"step {step}: {name}")
    first = model.init(jax.random.key(0), x, 0)
    assert_same_bits(state.params[OWG]["expert_1"], first[OWG]["expert_1"], "never used")
    assert np.isfinite(model.apply(state.params, x, 1)).all(), "its first use comes late and is right"


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return FP8(5, name="head")(nn.relu(FP8(7, name="backbone")(x)))


def test_frozen_layer():
    """The gradient is taken with respect to the head: the backbone's parameters and state stay, the head's roll."""
    model, x = TwoLayers(), normal(0, (6, 8))
    variables = model.init(jax.random.key(0), x)
    # A backbone that was trained before.
    variables = jaxfp8.update_state(variables, jax.grad(lambda v: jnp.sum(model.apply(v, x) ** 2))(variables))

    def head_of(variables):
        return {collection: {"head": variables[collection]["head"]} for collection in ("params", OWG)}

    @jax.jit
    def advance(variables, x):
        def loss(head):
            return jnp.sum(model.apply({c: {**variables[c], **head[c]} for c in variables}, x) ** 2)

        gradient = jax.grad(loss)(head_of(variables))
        return jaxfp8.update_state(variables, gradient), gradient

    start = variables
    for i in range(3):
        before, (variables, gradient) = variables, advance(variables, x * (2 + i))
        assert np.any(gradient["params"]["head"]["kernel"])
        assert_same_bits(variables[OWG]["backbone"], start[OWG]["backbone"], f"step {i}: backbone")
        history = [v[OWG]["head"]["Fp8DotGeneral_0"]["input_amax_history"] for v in (before, variables)]
        assert history[1][0] > history[0][0] > 0, f"step {i}: the head sees larger values and records them"


# ------------------------------------------------------------------------------------------------------- the same bits


def products_of(layer):
    """`(variables, x, grad) -> (y, (gradients of variables, dx))`, not jitted."""

    def step(variables, x, grad):
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, vjp(grad)

    return step


def test_jit_eager_second_run_and_donated():
    """Products and state, bitwise, from every way to run a step."""
    layer = dense(20, dtype=jnp.bfloat16)
    operands = normal(1, (48, 36), dtype=jnp.bfloat16), normal(2, (48, 20), dtype=jnp.bfloat16)
    variables = variables_of(normal(0, (36, 20)), used_state())
    step = products_of(layer)
    jitted = jax.jit(step)
    expected = jax.tree.map(np.asarray, jitted(variables, *operands))
    runs = {
        "second run": jitted,
        "eager": step,
        "compiled again": jax.jit(lambda *args: step(*args)),
        "remat": jax.jit(products_of(nn.remat(nn.Dense)(**fields(layer)))),
    }
    for name, run in runs.items():
        assert_same_bits(run(variables, *operands), expected, name)
    donated = jax.jit(step, donate_argnums=0)
    given = jax.tree.map(jnp.array, variables)
    assert_same_bits(donated(given, *operands), expected, "donated")
    assert any(leaf.is_deleted() for leaf in jax.tree.leaves(given)), "the buffers were taken"


def fields(layer):
    return {name: getattr(layer, name) for name in ("features", "use_bias", "dtype", "dot_general_cls")}


@pytest.mark.parametrize("traced_before", [True, False], ids=["traced", "traced by both at once"])
def test_two_threads_call_one_jitted_function(traced_before):
    """Each thread trains on its own data; both end in the bits of a run alone, and neither waits for ever."""
    steps, threads = 20, 2
    layer = dense(20, dtype=jnp.bfloat16)
    data = [
        [(normal(100 * t + i, (48, 36), 1 + i), normal(100 * t + 50 + i, (48, 20))) for i in range(steps)]
        for t in range(threads)
    ]

    def run(step, thread, barrier=None):
        variables, products = variables_of(normal(thread, (36, 20))), []
        for x, grad in data[thread]:
            if barrier is not None:
                barrier.wait(timeout=60)
            got = step(variables, x, grad)
            variables, products = got.variables, [*products, got[:3]]
        return products, variables

    alone = [run(step_of(layer), thread) for thread in range(threads)]
    for _ in range(1 if traced_before else 5):
        step, barrier = step_of(layer), threading.Barrier(threads)
        if traced_before:
            run(step, 0)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            futures = [pool.submit(run, step, thread, barrier) for thread in range(threads)]
            for thread, future in enumerate(futures):
                assert_same_bits(future.result(timeout=120), alone[thread], f"thread {thread}")


def donating_step(layer):
    """As `step_of`, and the variables are given away."""

    def step(variables, x, grad):
        y, vjp = jax.vjp(layer.apply, variables, x)
        gradient, dx = vjp(grad.astype(y.dtype))
        return y, dx, {"params": variables["params"], OWG: gradient[OWG]}

    return jax.jit(step, donate_argnums=0)


@pytest.mark.parametrize("shared", [True, False], ids=["one function", "a function each"])
def test_two_threads_with_functions_and_donated_state_of_their_own(shared):
    """Both at once, step by step: each ends in the bits of a run alone, and every state given away is gone."""
    steps, features = 12, (20, 20) if shared else (20, 12)

    def run(step, thread, barrier=None):
        width = features[thread]
        variables = jax.tree.map(jnp.array, variables_of(normal(thread, (36, width))))
        for i in range(steps):
            if barrier is not None:
                barrier.wait(timeout=60)
            given = variables
            x, grad = normal(100 * thread + i, (48, 36), 1 + i), normal(100 * thread + 50 + i, (48, width))
            y, dx, variables = step(variables, x, grad)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        return y, dx, variables

    def make():
        made = [donating_step(dense(width, dtype=jnp.bfloat16)) for width in features]
        return [made[0], made[0]] if shared else made

    alone = [run(step, thread) for thread, step in enumerate(make())]
    barrier = threading.Barrier(2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, step, thread, barrier) for thread, step in enumerate(make())]
        for thread, future in enumerate(futures):
            assert_same_bits(future.result(timeout=120), alone[thread], f"thread {thread}")


def test_a_donated_loop_keeps_nothing():
    """Twenty steps: no array of an earlier step is alive, in the loop or after it."""
    step = donating_step(dense(20))
    variables = jax.tree.map(jnp.array, variables_of(normal(0, (36, 20))))
    x, grad = jnp.asarray(normal(1, (48, 36))), jnp.asarray(normal(2, (48, 20)))
    old, alive = [], []
    for _ in range(20):
        old += [weakref.ref(leaf) for leaf in jax.tree.leaves(variables)]
        _, _, variables = step(variables, x, grad)
        alive.append(len(jax.live_arrays()))
    assert len(set(alive[2:])) == 1, alive
    gc.collect()
    assert not any(leaf() is not None for leaf in old)


def test_accumulation_into_donated_buffers():
    """The sum so far is given away in each of four microbatches: bitwise as without, and one buffer for all of them."""
    layer, variables = dense(20), variables_of(normal(0, (36, 20)), used_state())
    batches = [(normal(2 * i, (48, 36), 2.0**i), normal(2 * i + 1, (48, 20))) for i in range(4)]

    def accumulate(acc, variables, x, grad):
        gradient = jax.grad(lambda v: jnp.vdot(layer.apply(v, x), grad))(variables)
        return jaxfp8.accumulate_gradients(acc, gradient)

    def total(step):
        acc = jax.tree.map(jnp.zeros_like, variables)
        places = set()
        for x, grad in batches:
            given, acc = acc, step(acc, variables, x, grad)
            places.add(acc["params"]["kernel"].unsafe_buffer_pointer())
        return acc, given, places

    expected, *_ = total(jax.jit(accumulate))
    acc, given, places = total(jax.jit(accumulate, donate_argnums=0))
    assert_same_bits(acc, expected, "donated")
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)) and len(places) == 1
    largest = max(np.abs(x).max() for x, _ in batches)
    assert acc[OWG]["Fp8DotGeneral_0"]["input_amax_history"][0] == largest
    assert_same_bits(jaxfp8.update_state(variables, acc)[OWG], acc[OWG], "one step of the state")
