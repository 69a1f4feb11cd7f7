"""What the tests of NNX layers share; programs whose every amax is known are in
`programs/`.
"""

import functools

import oracle
from equality import assert_same_bits
from flax import nnx
from programs import known_amax
from programs.known_amax import HISTORY, RECIPES, K as K, M as M, N as N, leaves, merged
from programs.nnx import NNX, use as use

import jaxfp8
import jaxfp8.nnx

RECIPE, H = RECIPES["delayed"].recipe, HISTORY
linear = functools.partial(NNX.make, RECIPE)


def operands(seed, uses):
    """x `(uses, M, K)` and grad `(uses, M, N)`, f32, of another size in each use."""
    x, _, grad = known_amax.operands(seed)
    return x[:uses], grad[:uses]


def expected_state(uses, state):
    """The state after a step in which the layer ran on each `(x, kernel, grad)`."""
    return merged([oracle.dense_step(*operands, state).state for operands in uses])


def assert_state(product, expected, what):
    """Compare the variables of a Fp8DotGeneral or Fp8Einsum with an
    oracle.LayerState.
    """
    got = nnx.to_pure_dict(nnx.state(product, jaxfp8.nnx.OverwriteWithGradient))
    assert_same_bits(got, leaves(expected), what)
