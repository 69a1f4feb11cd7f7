"""`DelayedScaling(min_size=)`: small products stay in high precision, and their state
as it was.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import normal

import jaxfp8
from jaxfp8 import ops
from recipes.cases import MATMUL

RECIPE = jaxfp8.DelayedScaling(amax_history_len=3, min_size=8)


def step(x, kernel, recipe, state):
    def loss(x, kernel, state):
        return jnp.sum(
            jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state) ** 2
        )

    return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, state)


@pytest.mark.parametrize(
    "sizes, is_fp8",
    [((8, 8, 8), True), ((8, 8, 7), False), ((2, 64, 4), True)],
    ids=str,
)
def test_the_rule(sizes, is_fp8):
    """`m * n * k < min_size**3`: plain JAX below, and the state is not touched."""
    m, k, n = sizes
    x, kernel = normal(m, k), normal(k, n, seed=1)
    state = jaxfp8.init_state(RECIPE)
    dx, dkernel, next_state = step(x, kernel, RECIPE, state)
    plain = jax.grad(lambda x, kernel: jnp.sum((x @ kernel) ** 2), argnums=(0, 1))(
        x, kernel
    )
    # Two sums of at most 64 products in any order err by 2 * 64 * 2^-24 of their
    # absolute sums, here below 512; FP8 by 2^-4 of a product.
    for got, exact in zip((dx, dkernel), plain, strict=True):
        assert (np.max(np.abs(got - exact)) > 512 * 2**-17) == is_fp8
    touched = [np.any(leaf) for leaf in jax.tree.leaves(next_state)]
    assert touched == [is_fp8] * 6
    kept = jaxfp8.update_state(state, next_state)
    same = jax.tree.map(np.array_equal, kept, state)
    assert jax.tree.all(same) != is_fp8


def test_codes():
    """Codes that are there are used: they are what is known of the kernel where it has
    no source.
    """
    x, kernel = normal(4, 4), normal(4, 4, seed=1)
    state = jaxfp8.init_state(RECIPE)
    data, _ = ops.quantize(kernel, jnp.float32(1), jnp.float8_e4m3fn)
    q = jaxfp8.QTensor(data, jnp.ones((1,)))
    y = jaxfp8.dot_general(x, q, MATMUL, recipe=RECIPE, state=state)
    np.testing.assert_allclose(
        y, x @ np.asarray(data).astype(np.float32), rtol=0, atol=4 * 2**-20
    )
