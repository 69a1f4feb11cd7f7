"""An optimizer's step, with moments in float32 and in FP8."""

import functools

import jax
import jax.numpy as jnp
import optax
from _gpu_answers import expect_close
from _gpu_inputs import normal
from _gpu_layers import memory_mib
from _gpu_timing import Candidate, attempt, measure

import jaxfp8

OPTAX, FP8 = "optax, moments in float32", "jaxfp8, moments in FP8"


def adamw(options):
    """Time a step of AdamW on a kernel of 8192 x 8192 in float32; state and parameters
    are updated in place.
    """
    n = options.size(8192, 128)
    transformations = {
        OPTAX: optax.adamw(1e-3),
        FP8: jaxfp8.optim.quantized(optax.adamw(1e-3)),
    }
    candidates, errors, moved = {}, {}, {}

    def build(name, tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def new():
            params = {"kernel": normal(0, (n, n), jnp.float32)}
            return params, jax.jit(tx.init)(params)

        grads = {"kernel": normal(1, (n, n), jnp.float32)}
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*new(), grads).compile()
        holder = [new()]

        def call():
            holder[0] = compiled(*holder[0], grads)
            return holder[0]

        for _ in range(2):
            call()
        moved[name] = holder[0][0]["kernel"] - normal(0, (n, n), jnp.float32)
        text = compiled.as_text()
        return Candidate(
            call,
            1,
            {"custom_calls": text.count("jaxfp8_"), "memory_mib": memory_mib(compiled)},
        )

    for name, tx in transformations.items():
        attempt(candidates, errors, name, functools.partial(build, name, tx))
    if FP8 in candidates:
        # The first step is exact. In the second, moments are off by at most a spacing
        # of codes, 2**-3 of an element.
        expect_close(f"{FP8}: two steps", moved[FP8], moved[OPTAX], 2.0**-3)
    moved.clear()
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["ns_a_parameter"] = 1e3 * row["us"] / n**2
    return rows, errors
