"""Pipelines of four stages on (stage=4, data=2), as programs to be compared with the
run without a pipeline.

A stage is one layer with its own kernel and state. Microbatches enter at stage 0, move
on by one stage a tick and leave after the last; before and after there is nothing but
zeros (bubbles), which leave no trace in an amax.

Exact in any order, as mesh/cases.py: values are multiples of 1/4, and scales powers of
two because the recipe says so.

`python -m mesh.pipelines` runs all programs and prints the name of each that is right,
so that a test can stop one that hangs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
from mesh import cases
from mesh.by_hand import replicated, summed

STAGES, MICROBATCHES, ROWS, WIDTH = 4, 5, 4, 16
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT


def next_power_of_two(history):
    """The amax 7 * 2**n that no entry is above; 0 for an empty history."""
    top = jnp.max(history)
    _, exponent = jnp.frexp(top / 7)
    return jnp.where(top > 0, jnp.ldexp(jnp.float32(7), exponent), 0)


RECIPE = jaxfp8.DelayedScaling(amax_history_len=4, amax_compute_algo=next_power_of_two)
STAGED = dataclasses.replace(RECIPE, pipeline_axes=("stage",))


# ---------------------------------------------------------------------------- the model


@jax.custom_vjp
def activation(y):
    """Multiples of 1/4 from -8 to 8; the gradient passes through and is treated
    alike.
    """
    return jnp.clip(jnp.round(y * 4) / 4, -8, 8)


activation.defvjp(lambda y: (activation(y), None), lambda _, ct: (activation(ct),))


def layer(kernel, state, x, recipe=RECIPE):
    return activation(
        jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe, state=state)
    )


def weights():
    """One kernel a stage."""
    return (
        np.random.default_rng(0)
        .integers(-2, 3, (STAGES, WIDTH, WIDTH))
        .astype(np.float32)
        / 4
    )


def state():
    return cases.stacked(jaxfp8.init_state(RECIPE), STAGES)


def batches():
    """`(x, target)` of each step, `[microbatches, rows, width]`; the second microbatch
    has the largest values.
    """
    rng = np.random.default_rng(1)

    def tensor(size):
        values = rng.integers(-3, 4, (MICROBATCHES, ROWS, WIDTH)).astype(np.float32) / 4
        values[1, rng.integers(ROWS)] *= 2
        return values * np.float32(size)

    return [(tensor(size), tensor(1 / size)) for size in (1, 0.5, 2, 1)]


def make_step(value_and_grad):
    """`(weights, state, batch) -> (weights, state, loss)` from
    `(weights, state, x, target) -> (loss, gradients)`.
    """

    def step(weights, state, batch):
        loss, (of_weights, of_state) = value_and_grad(weights, state, *batch)
        weights = jnp.clip(weights - jnp.round(of_weights / 32) / 4, -1, 1)
        return weights, jaxfp8.update_state(state, of_state), loss

    return step


def differentiated(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


@functools.cache
def reference() -> cases.Run:
    """One device, all microbatches at once, stage by stage: without a pipeline."""

    def loss(weights, state, x, target):
        x = x.reshape(-1, WIDTH)
        for i in range(STAGES):
            x = layer(weights[i], cases.row(state, i), x)
        return jnp.sum(x * target.reshape(-1, WIDTH))

    return jax.device_get(
        cases.train(
            jax.jit(make_step(differentiated(loss))), weights(), state(), batches()
        )
    )


# ------------------------------------------------------------------------- the programs


def mesh():
    return cases.mesh(shape=(STAGES, 2), axes=("stage", "data"))


def with_bubbles(x):
    """What enters in each tick."""
    return jnp.concatenate([x, jnp.zeros((STAGES - 1, *x.shape[1:]), x.dtype)])


def rotated(stages):
    """The loss of a program that keeps the inputs of all stages in one array, and runs
    `stages` on it in each tick.
    """

    def loss(weights, state, x, target):
        def tick(held, x):
            held = jnp.roll(held, 1, axis=0).at[0].set(x)
            held = lax.with_sharding_constraint(
                held, NamedSharding(mesh(), P("stage", "data"))
            )
            held = stages(weights, state, held)
            return held, held[-1]

        _, last = lax.scan(tick, jnp.zeros((STAGES, *x.shape[1:])), with_bubbles(x))
        return jnp.sum(last[STAGES - 1 :] * target)

    return loss


def by_vmap():
    return make_step(differentiated(rotated(jax.vmap(layer))))


def by_ppermute(
    checked, recipe=RECIPE, inside=True, manual=("stage", "data"), skipping=False
):
    """Each device runs its stage, and sends what it has to the device with the next
    one.

    With `skipping` a stage does nothing where it has nothing to do: then not all
    devices take part in a reduction.
    """

    def total(x, axes):
        return lax.psum(x, axes) if checked else summed(x, axes)

    def loss(weights, state, x, target):
        kernel = weights[0]
        own = cases.row(state, 0)
        if not checked and "data" in manual:
            kernel = replicated(kernel, ("data",))
        stage = lax.axis_index("stage")

        def work(x):
            return layer(kernel, own, x, recipe)

        def tick(held, now):
            x, time = now
            came = lax.ppermute(
                held, "stage", [(i, (i + 1) % STAGES) for i in range(STAGES)]
            )
            came = jnp.where(stage == 0, x, came)
            is_busy = (time >= stage) & (time < stage + MICROBATCHES)
            held = (
                lax.cond(is_busy, work, lambda x: x, came) if skipping else work(came)
            )
            return held, held

        nothing = jnp.zeros(x.shape[1:])
        nothing = lax.pcast(nothing, manual, to="varying") if checked else nothing
        entering = with_bubbles(x)
        _, outs = lax.scan(tick, nothing, (entering, jnp.arange(len(entering))))
        return total(
            jnp.sum(jnp.where(stage == STAGES - 1, outs[STAGES - 1 :] * target, 0)),
            manual,
        )

    data = P(None, "data") if "data" in manual else P()
    stacked = (P("stage"), P("stage"))
    in_specs = (*stacked, data, data)
    mapped = functools.partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=in_specs,
        check_vma=checked,
        axis_names=set(manual),
    )
    if inside:
        return make_step(mapped(differentiated(loss), out_specs=(P(), stacked)))
    return make_step(differentiated(mapped(loss, out_specs=P())))


PROGRAMS = {
    "vmap": by_vmap,
    "shard_map": functools.partial(by_ppermute, checked=True),
    "shard_map, gradient outside": functools.partial(
        by_ppermute, checked=True, inside=False
    ),
    "shard_map, pipeline_axes": functools.partial(
        by_ppermute, checked=True, recipe=STAGED
    ),
    "shard_map, no check_vma": functools.partial(
        by_ppermute, checked=False, recipe=STAGED
    ),
    "shard_map over stages": functools.partial(
        by_ppermute, checked=True, manual=("stage",)
    ),
    "bubbles skipped": functools.partial(by_ppermute, checked=True, skipping=True),
    "bubbles skipped, no check_vma": functools.partial(
        by_ppermute, checked=False, recipe=STAGED, skipping=True
    ),
}


def run(make) -> cases.Run:
    """The training with a program."""
    on = mesh()
    kernels, states = (cases.put(tree, on, P("stage")) for tree in (weights(), state()))
    data = [cases.put(batch, on, P(None, "data")) for batch in batches()]
    out_shardings = cases.shardings(on, (P("stage"), P("stage"), P()))
    step = jax.jit(make(), out_shardings=out_shardings)
    return cases.train(step, kernels, states, data)


if __name__ == "__main__":
    for name, make in PROGRAMS.items():
        cases.assert_same(run(make), reference(), name)
        print(name)
