"""Trainers with the flaws that peers have: each must turn a test of this folder red."""

import functools

import jax
import jax.numpy as jnp
import pytest
from parametrize import each_row
from train import test_accumulate, test_optimizer, test_update_state

from jaxfp8 import ops
from jaxfp8.ops import _undo_factors
from jaxfp8.train import _optimizer, _steps, _update

pytestmark = [
    pytest.mark.usefixtures("promotion_as_optax_wants"),
    pytest.mark.usefixtures("nothing_stays_traced"),
]


scan = functools.partial(
    test_accumulate.test_training_with_microbatches, test_accumulate.in_a_scan
)
mean = test_accumulate.test_the_mean_is_of_parameters_alone
mini_steps = functools.partial(
    test_optimizer.test_multi_steps, test_optimizer.MULTI_STEPS["alone"], 3
)
decayed = test_optimizer.TRANSFORMATIONS["clip, weight decay"]
clipped = functools.partial(
    test_optimizer.test_state_is_overwritten_and_out_of_reach, decayed
)
rows = functools.partial(
    test_update_state.test_rows_decide_for_themselves, jax.jit(_update.update_state)
)
unscaled = functools.partial(test_update_state.test_safe_under_jit, 2.0**-16)
clipped_as_a_whole = functools.partial(
    test_update_state.test_other_factors_are_loud_under_jit, 0.0317, False
)
summed = functools.partial(test_update_state.test_raises_outside_of_jit, 2)
rejected = functools.partial(
    test_optimizer.test_rejected_steps_roll_back, test_optimizer.GUARDS["inside"]
)
largest = _steps.maximum


def stored_as_it_comes(old_history, old_scale, new_history, new_scale):
    return (
        new_history[..., :1],
        new_scale,
        jnp.zeros_like(new_scale),
        jnp.ones_like(new_scale),
    )


def in_jnp(check):
    """A check of the reference, whose arithmetic a mutant can change."""

    def run():
        with ops.implementation("reference"):
            check()

    return run


def add_the_difference(self, leaf):
    return leaf + (self.value - leaf)


MUTANTS = {
    "sum for max": (_steps, "maximum", lambda a, g: a + g, scan),
    "sum for max over mini-steps": (_steps, "maximum", lambda a, g: a + g, mini_steps),
    "the last microbatch wins": (_steps, "maximum", lambda a, g: g, scan),
    "state divided by n": (_steps, "maximum", lambda a, g: largest(a, g / 3), mean),
    "a roll for every microbatch": (
        _steps,
        "_any_differs",
        lambda *_: jnp.array(True),
        mini_steps,
    ),
    "state only of the last mini-step": (_steps, "maximum", lambda a, g: g, mini_steps),
    "untouched rows overwritten": (ops, "undo_factors", stored_as_it_comes, rows),
    "history stored as it comes": (
        ops,
        "undo_factors",
        stored_as_it_comes,
        unscaled,
    ),
    "every factor is tolerated": (
        _undo_factors,
        "FACTOR_TOLERANCE",
        1e9,
        in_jnp(unscaled),
    ),
    "every factor is undone": (
        _undo_factors,
        "_is_power_of_two_or_sum",
        lambda factor: factor > 0,
        in_jnp(clipped_as_a_whole),
    ),
    "nothing is reported": (_update, "_check_factors", lambda *_: None, summed),
    "a difference is added": (
        _optimizer.NeedsJaxfp8ApplyUpdates,
        "__radd__",
        add_the_difference,
        test_optimizer.test_overwrite_is_exact,
    ),
    "the optimizer sees state": (
        _optimizer,
        "_without_state",
        lambda tree: tree,
        clipped,
    ),
    "state of a rejected step": (
        _steps,
        "_rejected",
        lambda *_: jnp.array(False),
        rejected,
    ),
}


@each_row("owner, name, mutant, check", MUTANTS)
def test_mutants_are_seen(monkeypatch, owner, name, mutant, check):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        check()
