"""Whole training steps compiled for an H200, by each trainer, for `COUNTS` layers;
prints as JSON what `count` finds.

    python -m aot.trainers

The state of a step is updated in place, as a trainer does that gives it away.
"""

import functools
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import jaxfp8

from . import count, programs

COUNTS, WIDTH = (4, 12), 1024
TX = optax.adam(1e-3)


class Layers(nn.Module):
    """Dense layers of one width."""

    count: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.count):
            x = nn.Dense(WIDTH, use_bias=False, dtype=jnp.bfloat16)(x)
        return x


def report(cls, layers, change=dict) -> dict:
    """What is in the program of one step, with variables as `change` makes them."""
    model = jaxfp8.quantize(Layers(layers), [(".*", jaxfp8.DelayedScaling())])
    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    state = jax.eval_shape(
        lambda: cls.create(
            apply_fn=model.apply,
            params=change(model.init(jax.random.key(0), jnp.zeros(x.shape, x.dtype))),
            tx=TX,
        )
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x):
        def loss_fn(params):
            return jnp.mean(state.apply_fn(params, x).astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    lowered = step.lower(*programs.on_one((state, x)))
    text = lowered.compile().as_text()
    found = count.summary(text)
    buffers = [len(jax.tree.leaves(x)) for x in (lowered.in_avals, lowered.out_info)]
    return {
        "launches": found["launches"],
        "buffers": buffers,
        "writes": text.count('custom_call_target="jaxfp8_write_'),
    }


if __name__ == "__main__":
    trainers = {
        "flax": (train_state.TrainState, dict),
        "jaxfp8": (jaxfp8.linen.TrainState, dict),
        "stacked": (jaxfp8.linen.TrainState, jaxfp8.train.stack_state),
    }
    print(
        json.dumps(
            {
                f"{name}, {n}": report(cls, n, change)
                for name, (cls, change) in trainers.items()
                for n in COUNTS
            }
        )
    )
