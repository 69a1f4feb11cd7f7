"""Optimizer states in checkpoints: resumed to the bit from orbax and msgpack."""

import jax
import jax.numpy as jnp
import optax
import pytest
from bad_days.checkpoints import through_msgpack, through_orbax
from equality import assert_same_bits

from jaxfp8 import optim

from . import cases

# optax raises a float to an integer power
pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")


@pytest.mark.parametrize("through", [through_orbax, through_msgpack])
def test_a_run_resumes_to_the_bit(through, tmp_path):
    tx = optim.quantized(optax.adamw(1e-2))
    expected = cases.train(tx, cases.params(), 4)
    half = cases.train(tx, cases.params(), 2)
    params, opt_state = through(half, jax.tree.map(jnp.zeros_like, half), tmp_path)
    assert_same_bits((params, opt_state), half)
    assert_same_bits(cases.train(tx, params, 2, start=2, opt_state=opt_state), expected)
