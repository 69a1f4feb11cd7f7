"""ragged_dot against the oracle's loop over groups: products and gradients in their
bound, state bit by bit.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from programs.known_amax import merged
from recipes.delayed_cases import assert_state

import jaxfp8
from jaxfp8 import ops

from .ragged_cases import (
    HISTORY,
    RECIPE,
    SIZES,
    WITHOUT,
    compare_steps,
    operands,
    training_step,
)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_steps(sizes):
    compare_steps(sizes=sizes)


@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_dtypes(dtype):
    compare_steps(dtype=dtype)


@pytest.mark.parametrize("name", ["reference", "ffi", "xla"])
def test_implementations(name):
    with ops.implementation(name):
        compare_steps(steps=2)


def test_without_state():
    """Each scale from the tensor at hand, padding not in it: the same as a state whose
    history has its amax.
    """
    lhs, rhs, grad = operands(3)
    sizes = SIZES["rows beyond"]
    lhs[50:] = 1e9
    tops = [oracle.amax(x) for x in (lhs[:50], rhs, grad[:50])]
    state = oracle.LayerState(
        *(
            oracle.State(np.full(HISTORY, top, np.float32), np.float32(1))
            for top in tops
        )
    )
    expected = oracle.ragged_step(lhs, rhs, sizes, grad, state)
    y, dlhs, drhs, next_state = training_step()(
        lhs, rhs, grad, np.int32(sizes), WITHOUT
    )
    expected.check(y=y, dgrad=dlhs, wgrad=drhs)
    assert next_state == WITHOUT


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
    members = 2
    lhs, rhs, grad = operands(3, shape=(members,))
    lhs[1] *= 3
    sizes = np.int32([[10, 33, 7], [50, 0, 40]])
    state = jax.tree.map(lambda x: jnp.stack([x] * members), jaxfp8.init_state(RECIPE))
    shared = {
        "nothing": (),
        "state": (3,),
        "rhs and state": (1, 3),
        "lhs and sizes": (0, 2),
        "all but sizes": (0, 1, 3),
        "all but lhs": (1, 2, 3),
    }[share]
    args = [
        jax.tree.map(lambda x: x[0], x) if i in shared else x
        for i, x in enumerate((lhs, rhs, sizes, state))
    ]
    axes = tuple(None if i in shared else 0 for i in range(4))

    def loss(lhs, rhs, state):
        def product(lhs, rhs, sizes, state):
            return jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state)

        y = jax.vmap(product, in_axes=axes)(lhs, rhs, args[2], state)
        return jnp.sum(y * grad), y

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    (dlhs, drhs, next_state), y = run(args[0], args[1], args[3])
    init = oracle.LayerState.init(HISTORY)
    steps = [
        oracle.ragged_step(
            *(
                x if axis is None else x[i]
                for x, axis in zip(args[:3], axes, strict=False)
            ),
            grad[i],
            init,
        )
        for i in range(members)
    ]
    for i, step in enumerate(steps):
        step.y.check(y[i], f"member {i}")
    for got, name, axis in ((dlhs, "dgrad", axes[0]), (drhs, "wgrad", axes[1])):
        products = [getattr(step, name) for step in steps]
        if axis is None:
            exact = sum(p.exact for p in products)
            # and one addition
            bound = sum(p.bound for p in products) + 2 * oracle.PRECISE * np.abs(exact)
            assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all(), name
        else:
            for i, product in enumerate(products):
                product.check(got[i], f"{name} of member {i}")
    if axes[3] is None:
        assert_state(next_state, merged([step.state for step in steps]), share)
    else:
        for i, step in enumerate(steps):
            assert_state(
                jax.tree.map(lambda x: x[i], next_state),  # noqa: B023
                step.state,
                f"member {i}",
            )


# ------------------------------------------------------------------------------- errors


def _loss(lhs, state):
    rhs, sizes = np.ones((2, 4, 5), np.float32), np.int32([2, 3])
    return jnp.sum(jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state) ** 2)


def test_only_first_derivatives_in_reverse_mode():
    lhs, state = jnp.ones((6, 4)), jaxfp8.init_state(RECIPE)
    with warnings.catch_warnings(action="ignore", category=jaxfp8.FP8StateWarning):
        with pytest.raises(TypeError, match="first derivatives in reverse mode only"):
            jax.jvp(lambda x: _loss(x, state), (lhs,), (lhs,))
        with pytest.raises(TypeError):
            jax.jacfwd(lambda x: _loss(x, state))(lhs)
        with pytest.raises(TypeError, match="stop_gradient of the inner gradient"):
            jax.grad(lambda x: jnp.sum(jax.grad(_loss)(x, state)))(lhs)
        with pytest.raises(TypeError):
            jax.hessian(lambda x: _loss(x, state))(lhs)
