"""Optimizer states in checkpoints: resumed to the bit from orbax and msgpack."""

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from equality import assert_same_bits

from jaxfp8 import optim

from . import cases


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
        yield


def through_orbax(tree, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", jax.tree.map(jnp.zeros_like, tree))


def through_msgpack(tree, path):
    (path / "state").write_bytes(flax.serialization.to_bytes(tree))
    return flax.serialization.from_bytes(jax.tree.map(jnp.zeros_like, tree), (path / "state").read_bytes())


@pytest.mark.parametrize("through", [through_orbax, through_msgpack])
def test_a_run_resumes_to_the_bit(through, tmp_path):
    tx = optim.quantized(optax.adamw(1e-2))
    expected = cases.train(tx, cases.params(), 4)
    half = cases.train(tx, cases.params(), 2)
    params, opt_state = through(half, tmp_path)
    assert_same_bits((params, opt_state), half)
    assert_same_bits(cases.train(tx, params, 2, start=2, opt_state=opt_state), expected)
