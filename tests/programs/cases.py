"""What the written tests share: one product, operands with a history behind them, the
comparison with the oracle.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from equality import assert_same_bits
from recipes.cases import MATMUL as MATMUL

import jaxfp8
from programs.known_amax import RECIPES, K, M as ROWS, N, leaves, packed

RECIPE = RECIPES["delayed"].recipe


def product(x, kernel, state, recipe=RECIPE):
    """x `[m, K]` or `[K]`, kernel `[K, N]`."""
    dimension_numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return jaxfp8.dot_general(
        x,
        kernel,
        dimension_numbers,
        recipe=recipe,
        state=state,
        preferred_element_type=x.dtype,
    )


def operands(*batch, seed=0, dtype=np.float32, kernels=()):
    """x `[*batch, ROWS, K]`, kernel `[*kernels, K, N]`, grad of the result; sizes
    differ from one batch to the next.
    """
    rng = np.random.default_rng(seed)

    def normal(leading, *shape):
        size = 2.0 ** rng.uniform(-3, 3, (*leading, *(1 for _ in shape)))
        return (rng.standard_normal((*leading, *shape)) * size).astype(np.float32)

    x, grad = normal(batch, ROWS, K).astype(dtype), normal(batch, ROWS, N).astype(dtype)
    return x, normal(kernels, K, N), grad


def stacked(tree, count):
    """The tree of so many layers, all alike."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * count), tree)


def row(tree, i):
    """Layer `i` of a stacked tree."""
    return jax.tree.map(lambda leaf: leaf[i], tree)


def stack_rows(trees):
    """Trees of one structure as the layers of a stacked one."""
    return jax.tree.map(lambda *rows: jnp.stack(rows), *trees)


def sgd(params, gradient, rate):
    return jax.tree.map(lambda p, g: p - rate * g, params, gradient)


def pack(states):
    """LayerStates, nested in lists, as the package's pytree with as many leading
    axes.
    """
    if isinstance(states, list):
        return stack_rows(map(pack, states))
    return packed(leaves(states))


def assert_state(got, expected, what="state"):
    """Bitwise; `expected` as `pack` takes it."""
    assert_same_bits(got, pack(expected), what)


def assert_untouched(state):
    """All leaves of the cotangent are exactly 0."""
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state))


def one_product(x, kernel, grad, state) -> oracle.DenseStep:
    """All rows of x at once: what uses of one kernel and one state give together, in
    whatever program they are.

    Scales are those of the state, so codes do not depend on the grouping; the amax of
    all rows is the max of the groups' amaxes. The bound of the wgrad, of all rows in
    one sum, covers sums of partial sums.
    """
    flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return oracle.dense_step(
        flat_x, kernel, flat_grad, state, out_dtype=x.dtype, dgrad_dtype=x.dtype
    )
