"""Runs of delayed scaling, one step as a function, and comparisons with the oracle's state and products."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8

M, K, N = 24, 40, 33
MATMUL = (((1,), (0,)), ((), ()))
DTYPES = pytest.mark.parametrize("dtype", [np.dtype(np.float32), oracle.BF16, oracle.F16], ids=["f32", "bf16", "f16"])
OPERANDS = ("input", "kernel", "output_grad")
FORMATS = {
    "HYBRID": (jaxfp8.HYBRID, oracle.E4M3, oracle.E5M2),
    "E4M3": (jaxfp8.E4M3, oracle.E4M3, oracle.E4M3),
    "E5M2": (jaxfp8.E5M2, oracle.E5M2, oracle.E5M2),
}


def newest_two(history):
    """A callable algorithm that numpy and jnp run alike."""
    return history[:2].max()


def to_package(state: oracle.LayerState, dtype=np.float32):
    """The oracle's state as the package's pytree."""
    parts = (getattr(state, name) for name in OPERANDS)
    template = jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=len(state.input.amax_history)))
    leaves = [leaf for part in parts for leaf in (part.amax_history.astype(dtype), part.scale.reshape(1).astype(dtype))]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def assert_state(got, expected: oracle.LayerState, what: str, dtype=np.float32) -> None:
    for name in OPERANDS:
        part, wanted = getattr(got, name), getattr(expected, name)
        oracle.assert_bitwise(part.scale, wanted.scale.reshape(1).astype(dtype), f"{what}: {name} scale")
        oracle.assert_bitwise(part.amax_history, wanted.amax_history.astype(dtype), f"{what}: {name} amax_history")


def assert_step(got, expected: oracle.DenseStep, what: str) -> None:
    """`got` is (y, dx, dkernel, next state)."""
    y, dx, dkernel, state = got
    assert_state(state, expected.state, what)
    expected.y.check(y, f"{what}: y")
    expected.dgrad.check(dx, f"{what}: dgrad")
    expected.wgrad.check(dkernel, f"{what}: wgrad")


def training_step(recipe):
    """One jitted step of plain jaxfp8.dot_general: (x, kernel, grad, state) -> (y, dx, dkernel, next state)."""

    @jax.jit
    def step(x, kernel, grad, state):
        def product(x, kernel, state):
            return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)

        y, vjp = jax.vjp(product, x, kernel, state)
        return (y, *vjp(grad))

    return step


def linen_step(recipe, dtype):
    """The same of a linen Dense whose variables are rebuilt around kernel and state at each step."""
    layer = nn.Dense(N, use_bias=False, dtype=dtype, dot_general_cls=_dot_general_cls(recipe))

    @jax.jit
    def step(x, kernel, grad, state):
        variables = {
            "params": {"kernel": kernel.astype(jnp.float32)},
            jaxfp8.OVERWRITE_WITH_GRADIENT: {"Fp8DotGeneral_0": as_variables(state)},
        }
        y, vjp = jax.vjp(layer.apply, variables, x)
        cotangent, dx = vjp(grad)
        next_state = from_variables(cotangent[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"], state)
        return y, dx, cotangent["params"]["kernel"].astype(kernel.dtype), next_state

    return step


def _dot_general_cls(recipe):
    def make(**kwargs):
        return jaxfp8.Fp8DotGeneral(recipe=recipe, **kwargs)

    return make


def as_variables(state):
    return {f"{n}_{leaf}": getattr(getattr(state, n), leaf) for n in OPERANDS for leaf in ("amax_history", "scale")}


def from_variables(variables, like):
    leaves = [variables[f"{name}_{leaf}"] for name in OPERANDS for leaf in ("amax_history", "scale")]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def values(rng, shape, size, dtype):
    with np.errstate(over="ignore", under="ignore"):
        return (rng.standard_normal(shape) * size).astype(np.float32).astype(dtype)


def random_run(seed: int, steps: int, dtype):
    """(x, kernel, grad) of each step: ordinary values with drift, spikes, zeros, tiny amaxes, Infs and NaNs."""
    rng = np.random.default_rng(seed)
    for i in range(steps):
        operands = [
            values(rng, shape, size * 2.0 ** (3 * np.sin(i / 5)), dtype)
            for shape, size in (((M, K), 1.0), ((K, N), 0.1), ((M, N), 1e-3))
        ]
        for operand in operands:
            event = rng.integers(0, 12)
            where = tuple(rng.integers(0, n) for n in operand.shape)
            if event == 0:
                with np.errstate(over="ignore"):
                    operand *= np.array(1e4, dtype)
            elif event == 1:
                operand[:] = 0
            elif event == 2:
                operand[where] = rng.choice([np.nan, np.inf, -np.inf])
            elif event == 3:
                operand[:] = values(rng, operand.shape, 2.0 ** rng.integers(-140, -100), dtype)
            elif event == 4:
                operand[where] = np.array(3e4, dtype)
        yield operands


def scripted_run(dtype):
    """Every event once, where it decides a scale of a window of 4: bad values, a spike, zeros, tiny amaxes."""
    rng = np.random.default_rng(0)

    def step(size=1.0, **changes):
        operands = [
            values(rng, shape, size * ordinary, dtype)
            for shape, ordinary in (((M, K), 1.0), ((K, N), 0.1), ((M, N), 1e-3))
        ]
        for operand in operands:
            for where, value in changes.items():
                operand[{"first": (0, 0), "last": (-1, -1)}[where]] = np.array(value, dtype)
        return operands

    yield step()
    yield step(size=2.0)
    yield step(first=np.nan)
    yield step(last=-np.inf, first=-0.0)
    yield step(last=3e4)
    yield from (step() for _ in range(5))  # the spike acts, then leaves the window
    yield from (step(size=0.0) for _ in range(5))  # an empty window: the stored scale stays
    yield step()
    yield from (step(size=2.0**-128) for _ in range(5))  # subnormal in bf16 and f32, zero in float16
    yield from (step() for _ in range(3))


def products_of(dtype):
    return {"out_dtype": dtype, "dgrad_dtype": dtype, "wgrad_dtype": dtype}


def as_flat(tree) -> dict:
    return {"/".join(str(k.key) for k in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
