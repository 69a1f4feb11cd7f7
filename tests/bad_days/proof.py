"""Proof of training, small: characters of Python's own manual by a perceptron of their
neighbours, three seeds.
"""

import functools
import pydoc_data.topics

import flax.linen as nn
import jax
import numpy as np
import optax

import jaxfp8

from .verdict import Tally, row

CONTEXT, WIDTH, BATCH, STEPS = 8, 128, 256, 200
# of a batch that 128 such make together: gradients as small as those of real batches
SHARE = 1 / 128


@functools.cache
def text() -> np.ndarray:
    """The characters as numbers; the last tenth is for validation."""
    characters = "".join(pydoc_data.topics.topics.values())
    _, numbers = np.unique(list(characters), return_inverse=True)
    return numbers.astype(np.int32)


class Model(nn.Module):
    """The next character from the last eight; the three large products in the FP8 of
    `cls`.
    """

    cls: object = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(text().max() + 1, 32)(tokens).reshape(len(tokens), -1)
        for _ in range(3):
            x = nn.relu(nn.Dense(WIDTH, dot_general_cls=self.cls)(x))
        return nn.Dense(text().max() + 1)(x)


def windows(seed, first, last):
    starts = np.random.default_rng(seed).integers(first, last - CONTEXT - 1, BATCH)
    rows = text()[starts[:, None] + np.arange(CONTEXT + 1)]
    return rows[:, :-1], rows[:, -1]


def loss_of(model, variables, tokens, target):
    return optax.softmax_cross_entropy_with_integer_labels(
        model.apply(variables, tokens), target
    ).mean()


def train(library, seed, cls=None, frozen=False) -> float:
    """Validation loss after 200 steps; `frozen` throws the next state away, so that
    scales stay at 1.
    """
    model = Model(cls)
    cut = len(text()) * 9 // 10
    variables = model.init(jax.random.key(seed), windows(0, 0, cut)[0])
    make = library.train_state if cls else jaxfp8.linen.TrainState
    state = make.create(apply_fn=model.apply, params=variables, tx=optax.adam(3e-3))

    @jax.jit
    def step(state, tokens, target):
        grads = jax.grad(lambda v: SHARE * loss_of(model, v, tokens, target))(
            state.params
        )
        after = state.apply_gradients(grads=grads)
        if frozen:
            trained = {"params": after.params["params"]}
            after = after.replace(params=state.params | trained)
        return after

    for i in range(STEPS):
        state = step(state, *windows((seed, i), 0, cut))
    held_out = jax.jit(lambda v, t, n: loss_of(model, v, t, n))
    return float(
        np.mean(
            [
                held_out(state.params, *windows((9, i), cut, len(text())))
                for i in range(20)
            ]
        )
    )


@row("training as in f32; a control with all scales at 1 is not")
def proof(library):
    """The mean difference to f32 over three seeds is at most 0.02 nat; the control
    shows that the model needs scales.

    The full proof is `make train ARGS='--steps 1000 --seeds 3 --control'`.
    """
    tally = Tally()
    seeds = range(3)
    cls = library.dot_general_cls(16)
    difference = np.mean(
        [train(library, seed, cls) - train(library, seed) for seed in seeds]
    )
    control = train(library, 0, cls, frozen=True) - train(library, 0)
    said = f"{difference:+.4f} nat, control {control:+.4f}"
    tally(difference <= 0.02, said)
    tally(control > 0.1, f"the control trains as well: {said}")
    return tally.verdict(said)
