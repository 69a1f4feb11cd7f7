"""What state may hold: what trainers leave, bfloat16, bad values, nothing to see."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import normal
from oracle import BF16, F32
from parametrize import each_row

import jaxfp8

from .delayed_cases import (
    OPERANDS,
    K,
    M,
    N,
    assert_state,
    assert_step,
    scripted_run,
    to_package,
    training_step,
)

NAN, INF = F32(np.nan), F32(np.inf)
STATES = {
    "clean": ([3, 1, 2, 0], 0.5),
    "non-finite entries": ([NAN, 2, -NAN, INF], 0.5),
    "nothing usable in the history": ([-0.0, -NAN, NAN, INF], 0.25),
    "empty, scale kept": ([0, 0, 0, 0], 0.003),
    "scale 0": ([0, 0, 0, 0], 0.0),
    "scale NaN": ([0, 0, 0, 0], NAN),
    "scale Inf with a history": ([1, 2, 3, 4], INF),
    "scale out of range above": ([0, 0, 0, 0], 3e38),
    "smallest amax": ([1e-45, 0, 0, 0], 1.0),
}


# What no step makes and an optimizer's step does: the scale is NaN.
BELOW_ZERO = {
    "oldest entry, which is dropped": ([3, -5, 1, 1], 0.5),
    "entry -inf": ([3, 1, -INF, NAN], 0.5),
    "entry subnormal, the others empty": ([0, 0, -1e-45, 0], 0.5),
    "scale": ([0, 0, 0, 0], -3.0),
    "scale subnormal, with a history": ([3, 1, 2, 1], -1e-45),
}
OPTIONS = {
    "max": {},
    "most recent, margin 5": {"margin": 5, "amax_compute_algo": "most_recent"},
    "function, current": {
        "amax_compute_algo": lambda history: history[0],
        "first_step": "current",
    },
}


@pytest.mark.parametrize(
    "history, scale",
    [*STATES.values(), *BELOW_ZERO.values()],
    ids=[*STATES, *BELOW_ZERO],
)
@each_row("options", OPTIONS)
def test_states_that_a_trainer_may_leave(history, scale, options):
    """Each quantizer in turn: the product of two scales of 2**126 would overflow f32,
    which is GEMM's business.
    """
    clean = oracle.State(F32([2, 1, 1, 1]), F32(0.01))
    odd = oracle.State(F32(history), F32(scale))
    operands = [normal(M, K), normal(K, N, seed=1), normal(M, N, seed=2)]
    is_bad = (history, scale) in BELOW_ZERO.values()
    step = training_step(jaxfp8.DelayedScaling(amax_history_len=4, **options))
    options = oracle.Options(**options)
    for name in OPERANDS:
        state = oracle.LayerState(
            **{other: odd if other == name else clean for other in OPERANDS}
        )
        got = step(*operands, to_package(state))
        expected = oracle.dense_step(*operands, state, options)
        assert_step(got, expected, f"{name}, first step")
        # x enters y and wgrad, the kernel y and dgrad, the gradient both products of
        # the backward.
        spoilt = {"input": (0, 2), "kernel": (0, 1), "output_grad": (1, 2)}[name]
        assert all(np.isnan(got[i]).all() == (is_bad and i in spoilt) for i in range(3))
        # By the next step nothing of it is left but what the history says.
        got = step(*operands, got[-1])
        assert_step(
            got,
            oracle.dense_step(*operands, expected.state, options),
            f"{name}, second step",
        )


def test_bf16_state_is_read_as_f32():
    """Trainers cast trees; the arithmetic stays f32 and the cotangent has the leaf's
    dtype, as autodiff demands.
    """
    rounded = F32(F32([3.3, 0.7, 1.1]).astype(BF16))
    part = oracle.State(rounded, F32(F32(0.013).astype(BF16)))
    state = oracle.LayerState(part, part, part)
    recipe = jaxfp8.DelayedScaling(amax_history_len=3)
    operands = next(scripted_run(F32))
    y, dx, dkernel, got = training_step(recipe)(*operands, to_package(state, BF16))
    expected = oracle.dense_step(*operands, state)
    expected.check(y=y, dgrad=dx, wgrad=dkernel)
    assert_state(got, expected.state, "bf16 state", BF16)


def test_a_function_with_a_lower_bound():
    """A window without an amax keeps the scale."""
    recipe = jaxfp8.DelayedScaling(
        amax_history_len=4, amax_compute_algo=lambda history: 2 + jnp.max(history)
    )
    state = jaxfp8.recipes.QuantizerState(jnp.zeros(4), jnp.full(1, 0.5))
    q, state = recipe.quantizers().input.quantize(jnp.ones((2, 4)), state)
    assert q.scale_inv == 0.5
    q, _ = recipe.quantizers().input.quantize(jnp.ones((2, 4)), state)
    assert q.scale_inv == F32(3 / 448)


@pytest.mark.parametrize("margin", [0, 1])
def test_without_state(margin):
    """Inference: a product is what delayed scaling gives when every history holds the
    tensor's own amax.
    """
    operands = next(scripted_run(F32))
    states = [
        oracle.State(np.full(4, oracle.amax(operand), F32), F32(1))
        for operand in operands
    ]
    expected = oracle.dense_step(
        *operands, oracle.LayerState(*states), oracle.Options(margin=margin)
    )
    step = training_step(jaxfp8.DelayedScaling(margin=margin))
    without = jaxfp8.DotGeneralState(None, None, None)
    y, dx, dkernel, after = step(*operands, without)
    expected.check(y=y, dgrad=dx, wgrad=dkernel)
    assert after == without
