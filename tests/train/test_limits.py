"""What `update_state` cannot find, as docs/state.md says; what is found is in test_update_state.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfp8

from . import replay

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

CHANGES = {
    "clip by value": lambda grads: jax.tree.map(lambda g: jnp.clip(g, -0.05, 0.05), grads[0]),
    "sign": lambda grads: jax.tree.map(jnp.sign, grads[0]),
    "average of microbatches": lambda grads: jax.tree.map(lambda *g: sum(g) / len(g), *grads),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_that_keep_the_tail_are_not_found(change):
    """Outside of jit, where what is found raises, another amax is stored; the loop of the page stores the true one."""
    variables, right = replay.variables(), replay.variables()
    tx = jaxfp8.train.optimizer(optax.sgd(0.1))
    for step in range(2):
        batches = [replay.batch(10 * step + i) for i in range(3)]
        variables = jaxfp8.update_state(variables, change([replay.gradient(variables, *batch) for batch in batches]))
        acc = None
        for batch in batches:
            acc = jaxfp8.accumulate_gradients(acc, replay.gradient(right, *batch), weight=1 / 3)
        right = optax.apply_updates(right, tx.update(acc, tx.init(right), right)[0])
        stored, expected = (replay.state_of(v)["input_amax_history"][0] for v in (variables, right))
        assert stored != expected and expected == max(np.abs(x).max() for x, _ in batches)
