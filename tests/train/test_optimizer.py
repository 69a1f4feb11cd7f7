"""A bare optax loop around `jaxfp8.train.optimizer`: parameters as optax trains them,
state as numpy replays it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_same_bits
from parametrize import each_row

import jaxfp8
from jaxfp8 import FP8StateWarning, train

from . import replay

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

BATCHES = [replay.batch(i) for i in range(8)]


def bare_loop(tx, compiled=True):
    """`advance((variables, opt_state), x, grad)`: what everyone writes."""

    def advance(train, x, grad):
        variables, opt_state = train
        grads = jax.grad(replay.loss)(variables, x, grad)
        updates, opt_state = tx.update(grads, opt_state, variables)
        return optax.apply_updates(variables, updates), opt_state

    return jax.jit(advance) if compiled else advance


def start(tx):
    variables = replay.variables()
    return variables, tx.init(variables)


def shapes(tree) -> set:
    return {leaf.shape for leaf in jax.tree.leaves(tree)}


STATE_SHAPES = {(replay.HISTORY,), (1,)}
TRANSFORMATIONS = {
    "clip, weight decay": lambda: optax.chain(
        optax.clip_by_global_norm(0.01), optax.adamw(1e-2, weight_decay=0.5)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=lambda i: 0.01 / (1 + i)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"all": optax.adam(1e-2), "none": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda _: "all", params),
    ),
    "masked": lambda: optax.chain(
        optax.masked(
            optax.add_decayed_weights(0.1), lambda p: jax.tree.map(jnp.ndim, p)
        ),
        optax.sgd(0.1),
    ),
}


@each_row("make", TRANSFORMATIONS)
def test_state_is_overwritten_and_out_of_reach(make):
    """State bitwise as replayed; parameters bitwise as by the transformation alone; no
    slots for state.
    """
    tx = train.optimizer(make())
    alone = make()
    advance = bare_loop(tx)
    state = replay.first()
    now = start(tx)
    alone_state = alone.init(now[0]["params"])
    for i, batch in enumerate(BATCHES[:5]):
        params = now[0]["params"]
        grads = replay.gradient(now[0], *batch)["params"]
        state = replay.step(state, replay.kernel_of(now[0]), [batch])
        now = advance(now, *batch)
        replay.assert_state(now[0], state, f"step {i}")
        updates, alone_state = alone.update(grads, alone_state, params)
        expected = optax.apply_updates(params, updates)["kernel"]
        np.testing.assert_allclose(
            replay.kernel_of(now[0]), expected, rtol=1e-5, atol=1e-6
        )
    assert not shapes(now[1]) & STATE_SHAPES


@pytest.mark.parametrize("change", [lambda u: u + u, lambda u: -u, lambda u: 2 * u])
def test_arithmetic_with_the_bits_of_an_update_is_loud(change):
    """State below zero, also under jit; the update as it came replaces the leaf, and
    a zeroed one keeps it.
    """
    values = np.float32([0, 1e-45, 1e-8, 3e38, 1, np.inf])
    leaf = np.float32([1e8, np.nan, 1e8, -1e8, np.inf, 0])
    update = train._optimizer.NeedsJaxfp8ApplyUpdates(values)
    add = jax.jit(lambda leaf, update: leaf + update)
    assert_same_bits(add(leaf, update), values)
    assert_same_bits(add(leaf, jax.tree.map(jnp.zeros_like, update)), leaf)
    changed = add(leaf, jax.tree.map(change, update))
    np.testing.assert_array_equal(changed, np.float32([-1] * 6))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_state_that_was_cast_with_the_parameters(dtype):
    """optax keeps the dtype of a leaf, which is said; `jaxfp8.train.apply_updates`
    makes the state float32.
    """
    tx = train.optimizer(optax.sgd(0.1))
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), start(tx)[0])
    grads = jax.grad(replay.loss)(narrow, *BATCHES[0])
    with pytest.warns(
        FP8StateWarning,
        match=(
            f"input_amax_history in {np.dtype(dtype)}, which optax.apply_updates keeps"
        ),
    ):
        updates, _ = tx.update(grads, tx.init(narrow), narrow)
    next_variables = train.apply_updates(narrow, updates)
    expected = jaxfp8.update_state(narrow, grads)
    assert_same_bits(next_variables[replay.OWG], expected[replay.OWG])
    assert {leaf.dtype for leaf in jax.tree.leaves(next_variables[replay.OWG])} == {
        np.dtype(np.float32)
    }
    assert replay.kernel_of(next_variables).dtype == dtype
    zeroed = train.apply_updates(narrow, jax.tree.map(jnp.zeros_like, updates))
    assert_same_bits(
        zeroed[replay.OWG],
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow[replay.OWG]),
    )


def test_params_are_required():
    tx = train.optimizer(optax.sgd(0.1))
    variables, opt_state = start(tx)
    with pytest.raises(
        ValueError,
        match="train.optimizer: update: params: expected the parameters.*got None",
    ):
        tx.update(variables, opt_state)


def test_transformations_after_it_are_named():
    tx = optax.chain(train.optimizer(optax.sgd(0.1)), optax.scale(-1.0))
    variables, opt_state = start(tx)
    with pytest.raises(TypeError, match="wrap last"):
        bare_loop(tx)((variables, opt_state), *BATCHES[0])


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
def test_clipping_outside_is_loud(steps):
    """`chain(clip, optimizer(...))` clips state too: an error outside of jit, under jit
    NaN in the next product.
    """
    good = train.optimizer(optax.sgd(0.1))
    tx = optax.chain(optax.clip_by_global_norm(0.1), train.optimizer(optax.sgd(0.1)))
    now = start(good)
    for batch in BATCHES[:steps]:
        now = bare_loop(good)(now, *batch)
    now = now[0], tx.init(now[0])
    with pytest.raises(
        ValueError, match="averaged, clipped or unscaled.*train.optimizer.*global_norm"
    ):
        bare_loop(tx, compiled=False)(now, *BATCHES[steps])
    variables, _ = bare_loop(tx)(now, *BATCHES[steps])
    assert np.isnan(replay.loss(variables, *BATCHES[steps + 1]))


# ------------------------------------------------------------------------- accumulation

MULTI_STEPS = {
    "alone": lambda k: optax.MultiSteps(optax.sgd(0.1), k),
    "as a transformation": lambda k: optax.MultiSteps(
        optax.adam(1e-2), k
    ).gradient_transformation(),
    "in a chain": lambda k: optax.chain(
        optax.clip(1.0),
        optax.MultiSteps(
            optax.sgd(0.1), k, use_grad_mean=False
        ).gradient_transformation(),
    ),
}


@each_row("make", MULTI_STEPS)
@pytest.mark.parametrize("k", [1, 3])
def test_multi_steps(make, k):
    """One history entry for k mini-steps, their max; in between the state stays, bit by
    bit.
    """
    tx = train.optimizer(make(k))
    advance = bare_loop(tx)
    state = replay.first()
    now = start(tx)
    for i in range(3):
        batches = [replay.batch(100 * i + j) for j in range(k)]
        kernel = replay.kernel_of(now[0])
        for j, batch in enumerate(batches):
            replay.assert_state(now[0], state, f"step {i}, before mini-step {j}")
            now = advance(now, *batch)
        state = replay.step(state, kernel, batches)
        replay.assert_state(now[0], state, f"step {i}")
        assert not np.array_equal(kernel, replay.kernel_of(now[0]))


def test_trainers_read_the_steps_of_multi_steps():
    multi = optax.MultiSteps(optax.sgd(0.1), 2)
    tx = train.optimizer(multi)
    now = start(tx)
    seen = []
    for i in range(4):
        now = bare_loop(tx)(now, *replay.batch(i))
        opt_state = now[1]
        seen.append((int(opt_state.mini_step), int(opt_state.gradient_step)))
        assert multi.has_updated(opt_state) == (i % 2 == 1)
    assert seen == [(1, 0), (0, 1), (1, 1), (0, 2)]


# ------------------------------------------------------------------------ skipped steps


def spoil(batch):
    """The batch with an Inf in x, which makes the gradient of the kernel NaN, and a
    large amax of its gradient.
    """
    x = batch[0].copy()
    grad = batch[1] * np.float32(100)
    x[0, 0] = np.inf
    return x, grad


# An optimizer, and its batches, each with those whose state is stored after it; ~i is
# batch i, spoilt.
SKIPS = {
    "a guard": (
        lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
        [(~0, []), (~0, []), (1, [1])],
    ),
    "a guard in a chain": (
        lambda: optax.chain(optax.clip(1.0), optax.apply_if_finite(optax.sgd(0.1), 3)),
        [(~0, []), (1, [1])],
    ),
    "a mini-step": (
        lambda: optax.MultiSteps(
            optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
        ),
        [(0, []), (~1, []), (2, [0, 2])],
    ),
    "a guard around accumulation": (
        lambda: optax.apply_if_finite(MULTI_STEPS["as a transformation"](2), 5),
        [(0, []), (~1, []), (2, [0, 2])],
    ),
    "accumulation around a guard": (
        lambda: optax.MultiSteps(optax.apply_if_finite(optax.sgd(0.1), 5), 2),
        [(0, []), (~1, [])],
    ),
    "a guard that gives up": (
        lambda: optax.apply_if_finite(optax.sgd(0.1), 1),
        [(~0, []), (~0, [~0])],
    ),
}


def numbered(i):
    return BATCHES[i] if i >= 0 else spoil(BATCHES[~i])


@each_row("make, steps", SKIPS)
def test_what_is_skipped_never_happened(make, steps):
    """Not in the count, and not in the max. After too many rejections the update goes
    through; the state it brings is clean.
    """
    tx = train.optimizer(make())
    advance = bare_loop(tx)
    now = start(tx)
    kernel = replay.kernel_of(now[0])
    state = replay.first()
    for i, stored in steps:
        now = advance(now, *numbered(i))
        if stored:
            state = replay.step(state, kernel, list(map(numbered, stored)))
        replay.assert_state(now[0], state, f"batch {i}")
    has_nan = np.isnan(replay.kernel_of(now[0])).any()
    assert has_nan == (stored == [~0])  # the guard gave up
