"""ragged_dot against the oracle's loop over groups: products and gradients in their
bound, state bit by bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from parametrize import each_row
from programs.cases import stacked

import jaxfp8
from jaxfp8 import ops

from .ragged_cases import (
    RECIPE,
    SIZES,
    compare_steps,
    operands,
)


@each_row("sizes", SIZES)
def test_steps(sizes):
    compare_steps(sizes=sizes)


@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_dtypes(dtype):
    compare_steps(dtype=dtype)


@pytest.mark.parametrize("name", ["reference", "ffi", "xla"])
def test_implementations(name):
    with ops.implementation(name):
        compare_steps(steps=2)


@pytest.mark.parametrize(
    "m, k, n, g", [(0, 4, 5, 2), (6, 0, 5, 2), (6, 4, 0, 2), (6, 4, 5, 0)]
)
def test_no_elements(m, k, n, g):
    """Zeros, and a state that is not touched."""
    operands = jnp.ones((m, k)), jnp.ones((g, k, n)), jaxfp8.init_state(RECIPE)
    sizes = np.zeros(g, np.int32)

    def product(lhs, rhs, state):
        return jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state)

    y, vjp = jax.vjp(product, *operands)
    gradients = vjp(y)
    assert y.shape == (m, n)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, operands)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((y, gradients)))


# --------------------------------------------------------------------------------- vmap


def test_vmap():
    """As many products as members, each with the sizes of its groups and a state: the
    bits of each by itself. What members share is a row of `programs/`.
    """
    lhs, rhs, grad = operands(3, shape=(2,))
    sizes = np.int32([[10, 33, 7], [50, 0, 40]])
    state = stacked(jaxfp8.init_state(RECIPE), 2)

    def step(lhs, rhs, sizes, grad, state):
        def product(lhs, rhs, state):
            return jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state)

        y, vjp = jax.vjp(product, lhs, rhs, state)
        return y, *vjp(grad)

    members = lhs, rhs, sizes, grad, state
    got = jax.jit(jax.vmap(step))(*members)
    for i in range(2):
        one, of_one = jax.tree.map(lambda leaf, i=i: leaf[i], (members, got))
        assert_same_bits(of_one, step(*one))
