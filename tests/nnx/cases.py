"""What the tests of NNX layers share; programs whose every amax is known are in `programs/`."""

import numpy as np
import oracle
from equality import assert_same_bits
from flax import nnx
from programs.known_amax import HISTORY, OPERANDS as OPERANDS, RECIPES, leaves, merged
from programs.nnx import use as use

import jaxfp8
import jaxfp8.nnx

M, K, N, H = 6, 8, 5, HISTORY
RECIPE = RECIPES["delayed"].recipe


def linear(seed=0):
    return nnx.Linear(K, N, use_bias=False, dot_general=jaxfp8.nnx.Fp8DotGeneral(RECIPE), rngs=nnx.Rngs(seed))


def operands(seed, uses):
    """x `(uses, M, K)` and grad `(uses, M, N)`, f32, of another size in each use."""
    rng = np.random.default_rng(seed)
    sizes = rng.permutation(2.0 ** np.arange(uses))[:, None, None]
    draw = lambda *shape: (rng.standard_normal((uses, *shape)) * sizes).astype(np.float32)  # noqa: E731
    return draw(M, K), draw(M, N)


def expected_state(uses, state):
    """The state after a step in which the layer ran on each `(x, kernel, grad)`."""
    return merged([oracle.dense_step(*operands, state).state for operands in uses])


def assert_state(product, expected, what):
    """Compare the variables of a Fp8DotGeneral or Fp8Einsum with an oracle.LayerState."""
    got = nnx.to_pure_dict(nnx.state(product, jaxfp8.nnx.OverwriteWithGradient))
    assert_same_bits(got, leaves(expected), what)
