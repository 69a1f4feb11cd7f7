"""Operands, sizes of groups and training steps of ragged_dot, compared with the
oracle.
"""

import jax
import numpy as np
import oracle
from recipes.delayed_cases import assert_step

import jaxfp8

M, K, N = 90, 24, 40
HISTORY = 4
RECIPE = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
WITHOUT = jaxfp8.DotGeneralState(None, None, None)
SIZES = {
    "all rows": [40, 20, 30],
    "rows beyond": [10, 33, 7],
    "empty groups": [0, 60, 0, 0, 1, 0],
    "one group": [90],
    "part of one group": [3],
    "no row": [0, 0],
}


def operands(groups, dtype=np.float32, seed=0, shape=()):
    """lhs, rhs and the gradient of the output, of magnitudes apart."""
    rng = np.random.default_rng(seed)
    shapes = ((M, K), (groups, K, N), (M, N))
    factors = (3.0, 0.2, 0.01)
    return [
        (f * rng.standard_normal(shape + s)).astype(dtype)
        for f, s in zip(factors, shapes, strict=True)
    ]


@jax.jit
def training_step(lhs, rhs, grad, sizes, state):
    """`(y, dlhs, drhs, next state)`."""

    def product(lhs, rhs, state):
        return jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=RECIPE, state=state)

    y, vjp = jax.vjp(product, lhs, rhs, state)
    return (y, *vjp(grad.astype(y.dtype)))


def compare_steps(steps=3, sizes=SIZES["rows beyond"], dtype=np.float32):
    """Steps with other data each, and NaN where no group is, against the oracle."""
    state, package_state = oracle.LayerState.init(HISTORY), jaxfp8.init_state(RECIPE)
    for i in range(steps):
        lhs, rhs, grad = operands(len(sizes), dtype, seed=i)
        lhs[sum(sizes) :] = np.nan
        grad[sum(sizes) :] = np.inf
        dtypes = {name: dtype for name in ("out_dtype", "dgrad_dtype", "wgrad_dtype")}
        expected = oracle.ragged_step(lhs, rhs, sizes, grad, state, **dtypes)
        got = training_step(lhs, rhs, grad, np.int32(sizes), package_state)
        assert_step(got, expected, f"step {i}")
        state, package_state = expected.state, got[-1]
