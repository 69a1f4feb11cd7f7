"""What state may hold: what trainers leave, bfloat16, bad values, nothing to see."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits

import jaxfp8

from .cases import (
    MATMUL,
    OPERANDS,
    K,
    M,
    N,
    assert_state,
    assert_step,
    random_run,
    to_package,
    training_step,
    values,
)

NAN, INF = np.float32(np.nan), np.float32(np.inf)
STATES = {
    "clean": ([3, 1, 2, 0], 0.5),
    "non-finite entries": ([NAN, 2, -NAN, INF], 0.5),
    "negative zero": ([-0.0, -0.0, -0.0, -0.0], 0.25),
    "nothing usable in the history": ([-0.0, -NAN, NAN, INF], 0.25),
    "empty, scale kept": ([0, 0, 0, 0], 0.003),
    "scale 0": ([0, 0, 0, 0], 0.0),
    "scale 0 with a history": ([0, 7, 0, 0], 0.0),
    "scale -0": ([0, 0, 0, 0], -0.0),
    "scale NaN": ([0, 0, 0, 0], NAN),
    "scale Inf": ([0, 0, 0, 0], INF),
    "scale NaN with a history": ([1, 2, 3, 4], NAN),
    "scale Inf with a history": ([1, 2, 3, 4], INF),
    "scale out of range below": ([0, 0, 0, 0], 1e-45),
    "scale out of range above": ([0, 0, 0, 0], 3e38),
    "amax below 5e-36": ([1e-37, 2e-38, 0, 0], 1.0),
    "smallest amax": ([1e-45, 0, 0, 0], 1.0),
    "largest amax": ([3.4e38, 0, 0, 0], 1.0),
}


# What no step makes and an optimizer's step does: the scale is NaN.
BELOW_ZERO = {
    "newest entry": ([-5, 2, 1, 1], 0.5),
    "oldest entry, which is dropped": ([3, -5, 1, 1], 0.5),
    "entry -inf": ([3, 1, -INF, NAN], 0.5),
    "entry subnormal, the others empty": ([0, 0, -1e-45, 0], 0.5),
    "scale": ([0, 0, 0, 0], -3.0),
    "scale subnormal, with a history": ([3, 1, 2, 1], -1e-45),
    "scale -inf, with a history": ([3, 1, 2, 1], -INF),
}
OPTIONS = {
    "max": {},
    "most recent, margin 5": {"margin": 5, "amax_compute_algo": "most_recent"},
    "function, current": {"amax_compute_algo": lambda history: history[0], "first_step": "current"},
}


@pytest.mark.parametrize("history, scale", [*STATES.values(), *BELOW_ZERO.values()], ids=[*STATES, *BELOW_ZERO])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_states_that_a_trainer_may_leave(history, scale, options):
    """Each quantizer in turn: the product of two scales of 2**126 would overflow f32, which is GEMM's business."""
    clean = oracle.State(np.float32([2, 1, 1, 1]), np.float32(0.01))
    odd = oracle.State(np.float32(history), np.float32(scale))
    rng = np.random.default_rng(6)
    operands = [values(rng, shape, 1.0, np.float32) for shape in ((M, K), (K, N), (M, N))]
    is_bad = (history, scale) in BELOW_ZERO.values()
    step, options = training_step(jaxfp8.DelayedScaling(amax_history_len=4, **options)), oracle.Options(**options)
    for name in OPERANDS:
        state = oracle.LayerState(**{other: odd if other == name else clean for other in OPERANDS})
        got = step(*operands, to_package(state))
        expected = oracle.dense_step(*operands, state, options)
        assert_step(got, expected, f"{name}, first step")
        for leaf in jax.tree.leaves(got[-1]):
            assert not np.any(np.asarray(leaf) < 0) and (is_bad or np.isfinite(leaf).all())
        # x enters y and wgrad, the kernel y and dgrad, the gradient both products of the backward.
        spoilt = {"input": (0, 2), "kernel": (0, 1), "output_grad": (1, 2)}[name]
        assert all(np.isnan(got[i]).all() == (is_bad and i in spoilt) for i in range(3))
        # By the next step nothing of it is left but what the history says.
        got = step(*operands, got[-1])
        assert_step(got, oracle.dense_step(*operands, expected.state, options), f"{name}, second step")


def test_bf16_state_is_read_as_f32():
    """Trainers cast trees; the arithmetic stays f32 and the cotangent has the leaf's dtype, as autodiff demands."""
    rounded = np.float32(np.float32([3.3, 0.7, 1.1]).astype(oracle.BF16))
    part = oracle.State(rounded, np.float32(np.float32(0.013).astype(oracle.BF16)))
    state = oracle.LayerState(part, part, part)
    recipe = jaxfp8.DelayedScaling(amax_history_len=3)
    operands = next(random_run(7, 1, np.float32))
    y, dx, dkernel, got = training_step(recipe)(*operands, to_package(state, oracle.BF16))
    expected = oracle.dense_step(*operands, state)
    expected.y.check(y)
    expected.dgrad.check(dx)
    expected.wgrad.check(dkernel)
    assert_state(got, expected.state, "bf16 state", oracle.BF16)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spoilt", [0, 1, 2], ids=OPERANDS)
def test_one_bad_step_leaves_no_trace(bad, spoilt):
    """Visible in the product, 0 in the history, and the next good step has the scale it would have had."""
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    step = training_step(recipe)
    good = [np.full(shape, value, np.float32) for shape, value in (((M, K), 2.0), ((K, N), 0.5), ((M, N), 0.01))]
    *_, state = step(*good, jaxfp8.init_state(recipe))
    operands = [value.copy() for value in good]
    operands[spoilt][1, 1] = bad
    y, dx, dkernel, after = step(*operands, state)
    seen = {0: (y, dkernel), 1: (y, dx), 2: (dx, dkernel)}[spoilt]
    assert all(np.isnan(product).any() for product in seen)
    history = np.asarray(getattr(after, OPERANDS[spoilt]).amax_history)
    assert history[0] == 0 and np.isfinite(history).all()
    y, dx, dkernel, recovered = step(*good, after)
    assert np.isfinite(y).all() and np.isfinite(dx).all() and np.isfinite(dkernel).all()
    for name in OPERANDS:
        want = np.asarray(getattr(after, name).scale)  # same amax as before the bad step, so the same scale
        np.testing.assert_array_equal(getattr(recovered, name).scale, want)


def test_forward_alone_updates_nothing_and_equals_the_forward_of_training():
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    x, kernel, grad = next(random_run(8, 1, oracle.BF16))
    state = jaxfp8.init_state(recipe)
    y = jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)
    oracle.assert_bitwise(y, training_step(recipe)(x, kernel, grad, state)[0], "forward alone")
    layer = nn.Dense(N, dtype=jnp.bfloat16, dot_general_cls=jaxfp8.Fp8DotGeneral)
    variables = layer.init(jax.random.key(0), x)
    _, updates = layer.apply(variables, x, mutable=True)
    owg = jaxfp8.OVERWRITE_WITH_GRADIENT
    assert_same_bits(updates[owg], variables[owg])


def test_empty_operands_leave_the_state_untouched():
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    for shapes in (((0, 3), (3, 4), (0, 4)), ((2, 0), (0, 4), (2, 4)), ((2, 3), (3, 0), (2, 0))):
        operands = (np.ones(shape, np.float32) for shape in shapes)
        y, dx, dkernel, state = training_step(recipe)(*operands, jaxfp8.init_state(recipe))
        assert [v.shape for v in (y, dx, dkernel)] == [shapes[2], shapes[0], shapes[1]]
        assert not any(np.asarray(v).any() for v in (y, dx, dkernel))
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state)), "a zero cotangent: untouched"
