"""ragged_dot against the oracle's loop over groups: products and gradients in their
bound, state bit by bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from parametrize import each_row
from programs.cases import assert_state, stacked
from programs.known_amax import merged, sum_of

import jaxfp8
from jaxfp8 import ops

from .ragged_cases import (
    HISTORY,
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
    lhs = np.ones((m, k), np.float32)
    rhs = np.ones((g, k, n), np.float32)
    sizes = np.zeros(g, np.int32)

    def loss(lhs, rhs, state):
        y = jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state)
        np.testing.assert_array_equal(y.shape, (m, n))
        return jnp.sum(y)

    value, (dlhs, drhs, state) = jax.value_and_grad(loss, argnums=(0, 1, 2))(
        lhs, rhs, jaxfp8.init_state(RECIPE)
    )
    assert value == 0 and dlhs.shape == lhs.shape and drhs.shape == rhs.shape
    assert all(
        not np.asarray(leaf).any() for leaf in jax.tree.leaves((dlhs, drhs, state))
    )


# --------------------------------------------------------------------------------- vmap


@pytest.mark.parametrize(
    "share",
    ["nothing", "rhs and state", "all but lhs"]
    + [
        pytest.param(share, marks=pytest.mark.slow)
        for share in ("state", "lhs and sizes", "all but sizes")
    ],
)
def test_vmap(share):
    """As many products as members; what they share gets the sum of their gradients, a
    state the merged.
    """
    lhs, rhs, grad = operands(3, shape=(2,))
    lhs[1] *= 3
    sizes = np.int32([[10, 33, 7], [50, 0, 40]])
    shared = {
        "nothing": (),
        "state": (3,),
        "rhs and state": (1, 3),
        "lhs and sizes": (0, 2),
        "all but sizes": (0, 1, 3),
        "all but lhs": (1, 2, 3),
    }[share]
    state = stacked(jaxfp8.init_state(RECIPE), 2)
    arrays = [lhs, rhs, sizes, state]
    axes = [None if i in shared else 0 for i in range(4)]
    for i in shared:
        arrays[i] = jax.tree.map(lambda x: x[0], arrays[i])
        if i < 3:
            (lhs, rhs, sizes)[i][1] = arrays[i]

    def loss(lhs, rhs, state):
        def product(lhs, rhs, sizes, state):
            return jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state)

        y = jax.vmap(product, axes)(lhs, rhs, arrays[2], state)
        return jnp.sum(y * grad), y

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    (dlhs, drhs, next_state), y = run(arrays[0], arrays[1], arrays[3])
    init = oracle.LayerState.init(HISTORY)
    steps = [
        oracle.ragged_step(*member, init)
        for member in zip(lhs, rhs, sizes, grad, strict=True)
    ]
    for got, name, axis in (
        (y, "y", 0),
        (dlhs, "dgrad", axes[0]),
        (drhs, "wgrad", axes[1]),
    ):
        products = [getattr(step, name) for step in steps]
        if axis is None:
            got, products = [got], [sum_of(products)]
        for member, product in zip(got, products, strict=True):
            product.check(member, name)
    states = [step.state for step in steps]
    assert_state(next_state, merged(states) if axes[3] is None else states, share)
