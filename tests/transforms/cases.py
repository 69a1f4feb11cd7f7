"""What the written tests share: one product, operands with a history behind them, the comparison with the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxfp8

HISTORY = 4
ROWS, K, N = 4, 6, 5
MATMUL = (((1,), (0,)), ((), ()))
RECIPE = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
QUANTIZERS = ("input", "kernel", "output_grad")


def product(x, kernel, state):
    """x `[m, K]` or `[K]`, kernel `[K, N]`."""
    dimension_numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return jaxfp8.dot_general(x, kernel, dimension_numbers, recipe=RECIPE, state=state, preferred_element_type=x.dtype)


def operands(*batch, seed=0, dtype=np.float32, kernels=()):
    """x `[*batch, ROWS, K]`, kernel `[*kernels, K, N]`, grad of the result; sizes differ from one batch to the next."""
    rng = np.random.default_rng(seed)

    def normal(leading, *shape):
        size = 2.0 ** rng.uniform(-3, 3, (*leading, *(1 for _ in shape)))
        return (rng.standard_normal((*leading, *shape)) * size).astype(np.float32)

    x, grad = normal(batch, ROWS, K).astype(dtype), normal(batch, ROWS, N).astype(dtype)
    return x, normal(kernels, K, N), grad


def oracle_state(seed=0) -> oracle.LayerState:
    """Full histories, no two slots alike, and stored scales that no history gives."""
    rng = np.random.default_rng(seed + 1000)

    def quantizer():
        return oracle.State(rng.uniform(1, 9, HISTORY).astype(np.float32), np.float32(rng.uniform(1, 2)))

    return oracle.LayerState(quantizer(), quantizer(), quantizer())


def pack(states):
    """LayerStates, nested in lists, as the package's pytree with as many leading axes."""
    if isinstance(states, list):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(pack(state) for state in states))
    parts = ((getattr(states, name).amax_history, getattr(states, name).scale.reshape(1)) for name in QUANTIZERS)
    return jaxfp8.DotGeneralState(*(jaxfp8.recipes.QuantizerState(*map(jnp.asarray, part)) for part in parts))


def assert_state(got, expected, what="state"):
    """Bitwise; `expected` as `pack` takes it."""
    assert_packed(got, pack(expected), what)


def assert_packed(got, expected, what="state"):
    """Bitwise, leaf by leaf; both as the package's pytree."""
    expected = dict(jax.tree.leaves_with_path(expected))
    for path, leaf in jax.tree.leaves_with_path(got):
        oracle.assert_bitwise(leaf, expected.pop(path), f"{what}: {jax.tree_util.keystr(path)}")
    assert not expected, f"{what}: missing {list(expected)}"


def assert_untouched(state):
    """All leaves of the cotangent are exactly 0."""
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state))


def one_product(x, kernel, grad, state) -> oracle.DenseStep:
    """All rows of x at once: what uses of one kernel and one state give together, in whatever program they are.

    Scales are those of the state, so codes do not depend on the grouping; the amax of all rows is the max of the
    groups' amaxes. The bound of the wgrad, of all rows in one sum, covers sums of partial sums.
    """
    flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return oracle.dense_step(flat_x, kernel, flat_grad, state, out_dtype=x.dtype, dgrad_dtype=x.dtype)


def merged(states) -> oracle.LayerState:
    """The state after uses that gave these: all the same but for slot 0, where the largest amax stays."""

    def largest(*parts):
        history = functools.reduce(np.maximum, [part.amax_history for part in parts])
        assert all(np.array_equal(part.amax_history[1:], history[1:]) for part in parts)
        assert len({float(part.scale) for part in parts}) == 1
        return oracle.State(history, parts[0].scale)

    return oracle.LayerState(*(largest(*(getattr(state, name) for state in states)) for name in QUANTIZERS))
