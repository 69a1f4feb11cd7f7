"""Train the arms of one seed on the same batches, turn by turn."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _compare_arms import Arm
from _compare_model import LanguageModel
from _compare_runs import Run
from flax.training import train_state

from jaxfp8 import mixed_precision

PEAK_LEARNING_RATE = 3e-3


class TrainState(train_state.TrainState):
    """Flax's TrainState with the loss scale of float16, which is None in the other
    arms.
    """

    loss_scale: Any = None


def loss_fn(variables, apply_fn, batch):
    """Return the mean cross entropy of the next character, in nat; `batch` is int32
    `[batch, length + 1]`.
    """
    logits = apply_fn(variables, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch):
    """Take one step; return `(state, loss, made)`, where made is False for a step that
    was skipped.

    A step is skipped if scaled gradients overflow.
    """
    scale = state.loss_scale
    if scale is None:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, batch)
        return state.apply_gradients(grads=grads), loss, True
    # Scale the loss, and keep the old state where scaled gradients overflow.
    loss, grads = mixed_precision.value_and_grad(loss_fn, scale)(
        state.params, state.apply_fn, batch
    )
    finite = mixed_precision.all_finite(grads)
    next_state = mixed_precision.select(
        finite, state.apply_gradients(grads=grads), state
    )
    return next_state.replace(loss_scale=scale.adjust(finite)), loss, finite


@jax.jit
def mean_loss(state: TrainState, batches):
    """Return the mean loss of `[batches, batch, length + 1]`; one batch at a time, to
    keep the memory small.
    """
    return jax.lax.map(
        functools.partial(loss_fn, state.params, state.apply_fn), batches
    ).mean()


def make_optimizer(steps: int):
    """Make AdamW after clipping; warm-up over the first tenth of the run, then a cosine
    to a tenth of the peak.
    """
    rate = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_LEARNING_RATE, steps // 10, steps, PEAK_LEARNING_RATE / 10
    )
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
    )


def create_state(arm: Arm, model: LanguageModel, seed: int, optimizer) -> TrainState:
    """Create the first state: the same parameters in every arm, and the FP8 state of
    the arm's recipe.
    """
    # A layer gets the state of the recipe that is selected while it is initialized.
    with arm.region():
        variables = jax.jit(model.init)(
            jax.random.key(seed), jnp.zeros((1, model.length), jnp.int32)
        )
    scale = mixed_precision.DynamicLossScale() if arm.loss_scaled else None
    return TrainState.create(
        apply_fn=model.apply, params=variables, tx=optimizer, loss_scale=scale
    )


def train(arms, steps, states, batches, validation, count, on_step=lambda runs: None):
    """Train all arms in turns, a step of each, so that a busy machine slows all arms
    alike.

    Args:
        arms: a dict name -> Arm.
        steps: a dict name -> compiled `train_step`.
        states: a dict name -> TrainState, whose arrays are donated.
        batches: an iterable of `count` arrays int32 `[batch, length + 1]`.
        validation: int32 `[batches, batch, length + 1]`; None for no validation.
        count: the number of steps.
        on_step: a function that is called with the runs after each turn.

    Returns:
        `(states, runs)`: dicts name -> last TrainState and name -> Run.
    """
    states, runs = dict(states), {name: Run() for name in arms}
    for i, batch in enumerate(batches, start=1):
        for name, run in runs.items():
            start = time.perf_counter()
            # Wait for each step: otherwise the time of one arm would hold the work of
            # another.
            states[name], loss, made = jax.block_until_ready(
                steps[name](states[name], batch)
            )
            run.step_ms.append(1e3 * (time.perf_counter() - start))
            run.train_losses.append(float(loss))
            run.skipped += not made
        # Validate ten times in a run, and after its last step.
        if validation is not None and (i % max(1, count // 10) == 0 or i == count):
            for name, run in runs.items():
                with arms[name].region():
                    run.validation.append(
                        (i, float(mean_loss(states[name], validation)))
                    )
        on_step(runs)
    return states, runs


def time_steps(steps, states, batch, turns: int) -> dict[str, list[float]]:
    """Return for each arm the ms of `turns` steps.

    A turn takes two steps of each arm: the first warms the heap, the second is timed.
    """
    states, times = dict(states), {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            states[name], _, _ = jax.block_until_ready(step(states[name], batch))
            start = time.perf_counter()
            states[name], _, _ = jax.block_until_ready(step(states[name], batch))
            times[name].append(1e3 * (time.perf_counter() - start))
    return times
