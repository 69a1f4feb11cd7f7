"""Runs of delayed scaling, one step as a function, and comparisons with the oracle's
state and products.
"""

import jax
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from oracle import BF16, E4M3, E5M2, F16, F32
from programs.cases import MATMUL, pack
from programs.known_amax import OPERANDS as OPERANDS

import jaxfp8

M, K, N = 24, 40, 33
DTYPES = pytest.mark.parametrize(
    "dtype", [np.dtype(F32), BF16, F16], ids=["f32", "bf16", "f16"]
)
FORMATS = {
    "HYBRID": (jaxfp8.Format.HYBRID, E4M3, E5M2),
    "E4M3": (jaxfp8.Format.E4M3, E4M3, E4M3),
    "E5M2": (jaxfp8.Format.E5M2, E5M2, E5M2),
}


def newest_two(history):
    """A callable algorithm that numpy and jnp run alike."""
    return history[:2].max()


def to_package(state: oracle.LayerState, dtype=F32):
    """The oracle's state as the package's pytree."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), pack(state))


def assert_state(got, expected: oracle.LayerState, what: str, dtype=F32) -> None:
    assert_same_bits(got, to_package(expected, dtype), f"{what}: state")


def assert_step(got, expected: oracle.DenseStep, what: str) -> None:
    """`got` is (y, dx, dkernel, next state)."""
    y, dx, dkernel, state = got
    assert_state(state, expected.state, what)
    expected.check(what, y=y, dgrad=dx, wgrad=dkernel)


def training_step(recipe):
    """One jitted step of plain jaxfp8.dot_general: (x, kernel, grad, state) -> (y, dx,
    dkernel, next state).
    """

    @jax.jit
    def step(x, kernel, grad, state):
        def product(x, kernel, state):
            return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)

        y, vjp = jax.vjp(product, x, kernel, state)
        return (y, *vjp(grad))

    return step


def compare_run(recipe, run, options=None, **formats):
    """Train one product on the operands of a run, in their dtype; raise AssertionError
    at the first difference.
    """
    state = oracle.LayerState.init(recipe.amax_history_len)
    step, package_state = training_step(recipe), jaxfp8.init_state(recipe)
    for i, operands in enumerate(run):
        dtype = operands[0].dtype
        dtypes = {"out_dtype": dtype, "dgrad_dtype": dtype, "wgrad_dtype": dtype}
        expected = oracle.dense_step(
            *operands, state, options or oracle.Options(), **formats, **dtypes
        )
        got = step(*operands, package_state)
        assert_step(got, expected, f"step {i}")
        state, package_state = expected.state, got[-1]


def values(rng, shape, size, dtype):
    with np.errstate(over="ignore", under="ignore"):
        return (rng.standard_normal(shape) * size).astype(F32).astype(dtype)


def scripted_run(dtype):
    """Every event once, where it decides a scale of a window of 4: bad values, a spike,
    zeros, tiny amaxes.
    """
    rng = np.random.default_rng(0)

    def step(size=1.0, **changes):
        operands = [
            values(rng, shape, size * ordinary, dtype)
            for shape, ordinary in (((M, K), 1.0), ((K, N), 0.1), ((M, N), 1e-3))
        ]
        for operand in operands:
            for where, value in changes.items():
                operand[{"first": (0, 0), "last": (-1, -1)}[where]] = np.array(
                    value, dtype
                )
        return operands

    yield step()
    yield step(size=2.0)
    yield step(first=np.nan)
    yield step(last=-np.inf, first=-0.0)
    yield step(last=3e4)
    yield from (step() for _ in range(5))  # the spike acts, then leaves the window
    # an empty window: the stored scale stays
    yield from (step(size=0.0) for _ in range(5))
    yield step()
    # subnormal in bf16 and f32, zero in float16
    yield from (step(size=2.0**-128) for _ in range(5))
    yield from (step() for _ in range(3))
