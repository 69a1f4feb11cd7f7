"""A Dense layer whose every training step numpy can replay: the loss is
`sum(y * grad)`, so `grad` is known.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from draws import KEY
from equality import assert_same_bits
from programs.known_amax import HISTORY, OPERANDS as OPERANDS, RECIPES, leaves, merged

import jaxfp8

M, K, N = 6, 8, 5
OWG = "_overwrite_with_gradient"
RECIPE = RECIPES["delayed"].recipe
LAYER = nn.Dense(
    N,
    use_bias=False,
    dot_general_cls=jaxfp8.make_dot_general_cls(RECIPE),
)


def variables():
    """First variables of the layer."""
    return LAYER.init(KEY, np.ones((M, K), np.float32))


def batch(seed: int, size: float = 1.0):
    """(x, grad) of one microbatch; sizes vary, so that sums, means and maxima of amaxes
    differ.
    """
    rng = np.random.default_rng(seed)
    size = size * 2.0 ** rng.uniform(-3, 3)
    x = rng.standard_normal((M, K)) * size
    grad = rng.standard_normal((M, N)) * size / 100
    return x.astype(np.float32), grad.astype(np.float32)


def loss(variables, x, grad):
    """The loss whose gradient with respect to the layer's output is `grad`."""
    return jnp.vdot(LAYER.apply(variables, x), grad)


gradient = jax.jit(jax.grad(loss))


def state_of(variables) -> dict[str, np.ndarray]:
    """The six leaves of the layer's state."""
    return jax.tree.map(np.asarray, dict(variables[OWG]["Fp8DotGeneral_0"]))


def kernel_of(variables) -> np.ndarray:
    return np.asarray(variables["params"]["kernel"])


def first() -> oracle.LayerState:
    return oracle.LayerState.init(HISTORY)


def step(state: oracle.LayerState, kernel, batches) -> oracle.LayerState:
    """One optimizer step over microbatches: one roll, slot 0 the largest of their
    amaxes.
    """
    return merged(
        [oracle.dense_step(x, kernel, grad, state).state for x, grad in batches]
    )


def assert_state(got, expected: oracle.LayerState, what: str) -> None:
    """The stored variables are the expected ones, bitwise."""
    assert_same_bits(state_of(got), leaves(expected), what)
