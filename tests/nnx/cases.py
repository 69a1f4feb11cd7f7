"""A layer whose operands are all known, and the oracle's state for any number of uses of it in one step.

`use` is `vdot(layer(x), grad)`, so that `grad` is, to the bit, what arrives at the layer's output.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import nnx

import jaxfp8
import jaxfp8.nnx

M, K, N, H = 6, 8, 5, 4
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)
OPERANDS = ("input", "kernel", "output_grad")


def linear(seed=0):
    return nnx.Linear(K, N, use_bias=False, dot_general=jaxfp8.nnx.Fp8DotGeneral(RECIPE), rngs=nnx.Rngs(seed))


def operands(seed, uses):
    """x `(uses, M, K)` and grad `(uses, M, N)`, f32, of another size in each use."""
    rng = np.random.default_rng(seed)
    sizes = rng.permutation(2.0 ** np.arange(uses))[:, None, None]
    draw = lambda *shape: (rng.standard_normal((uses, *shape)) * sizes).astype(np.float32)  # noqa: E731
    return draw(M, K), draw(M, N)


def use(layer, x, grad):
    return jnp.vdot(layer(x), grad)


def expected_state(uses, state):
    """The state after a step in which the layer ran on each `(x, kernel, grad)`: tails and scales agree, slot 0 is the
    max; as 0 is the smallest of all entries an elementwise max says just that."""
    steps = [oracle.dense_step(*operands, state).state for operands in uses]

    def combine(name):
        parts = [getattr(step, name) for step in steps]
        assert len({part.scale for part in parts}) == 1
        return oracle.State(np.max([part.amax_history for part in parts], axis=0), parts[0].scale)

    return oracle.LayerState(*map(combine, OPERANDS))


def assert_state(product, expected, what, row=()):
    """Compares the variables of a Fp8DotGeneral or Fp8Einsum, or the rows `row` of them, with an oracle.LayerState."""
    for name in OPERANDS:
        wanted = getattr(expected, name)
        for leaf, value in (("amax_history", wanted.amax_history), ("scale", wanted.scale.reshape(1))):
            got = np.asarray(getattr(product, f"{name}_{leaf}").get_value())[row]
            oracle.assert_bitwise(got, value, f"{what}: {name}_{leaf}")


def assert_kernel_gradient(got, uses, state, what):
    """The sum over the uses of the exact products, within four times the sum of their bounds.

    A program may contract all uses in one product, of at most 3 times the length, whose accumulation bound is 3 times
    as large; two more additions in f32 are well within the rest.
    """
    products = [oracle.dense_step(*operands, state).wgrad for operands in uses]
    exact, bound = (sum(getattr(product, field) for product in products) for field in ("exact", "bound"))
    oracle.Product(exact, 4 * bound).check(got, what)


def assert_plain(model):
    """Nothing but float32 arrays is left in the model's state."""
    leaves = jax.tree.leaves(nnx.state(model, jaxfp8.nnx.OverwriteWithGradient))
    assert leaves and all(leaf.dtype == np.dtype(np.float32) for leaf in leaves)
    np.asarray(leaves[0])
