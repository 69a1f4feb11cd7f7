"""State that no step can make: an optimizer has stepped on it, and the loss must say
so.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from programs.cases import MATMUL, stacked

import jaxfp8

from .steps import normal
from .trainers import K, N, loss_of, operands, variables_of
from .verdict import Tally, row

OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-3), "lion": optax.lion(1e-4)}


def loss_at(library, i):
    """The loss of variables on batch `i`."""
    x, _, grad = operands(i)
    return lambda variables: loss_of(library, variables, x, grad)


def stepped_on(library, tx):
    """Variables after one step of a tutorial's loop: the optimizer steps on all
    variables.
    """
    variables = variables_of(library)
    gradient = jax.jit(library.grad(loss_at(library, 0)))(variables)
    updates, _ = tx.update(gradient, tx.init(variables), variables)
    return optax.apply_updates(variables, updates)


@row("plain optax over all variables: NaN at the second step", any_layer=True)
def plain_optax(library):
    tally = Tally()
    for name, tx in OPTIMIZERS.items():
        value = jax.jit(loss_at(library, 1))(stepped_on(library, tx))
        tally(np.isnan(value), f"{name}: the loss is {value}")
    return tally.verdict("NaN")


@row("the same in a scan over layers", peer="the state of Flax's layers is read alike")
def stacked_rows(library):
    """One row of a stack is spoilt: its layer is NaN, the others are what they were."""
    tally = Tally()
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)
    x = normal(1, (4, K))
    kernels = jnp.asarray(normal(2, (3, K, N)))
    state = stacked(jaxfp8.init_state(recipe), 3)

    def layer(state, kernel):
        return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)

    for path in ("amax_history", "scale"):
        part = {path: getattr(state.input, path).at[1, 0].set(-1e-3)}
        spoilt = dataclasses.replace(
            state, input=dataclasses.replace(state.input, **part)
        )
        for way, run in (
            ("vmap", lambda s: jax.vmap(layer)(s, kernels)),
            ("scan", lambda s: jax.lax.map(lambda at: layer(*at), (s, kernels))),
        ):
            want = np.asarray(jax.jit(run)(state))
            got = np.asarray(jax.jit(run)(spoilt))
            tally(
                np.isnan(got[1]).all(), f"{way}, {path}: the row's product is not NaN"
            )
            tally(
                np.array_equal(want[[0, 2]], got[[0, 2]]),
                f"{way}, {path}: other rows have changed",
            )
    return tally.verdict("NaN in its row alone")
