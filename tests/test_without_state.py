"""Inference: no state in the variables, or scales that are given."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8

MATMUL = (((1,), (0,)), ((), ()))
M, K, N = 16, 32, 24
STATELESS = jaxfp8.DotGeneralState(None, None, None)


def operands(size=300.0):
    rng = np.random.default_rng(0)
    shapes = (M, K), (K, N), (M, N)
    return [(rng.standard_normal(shape) * size).astype(np.float32) for shape in shapes]


def with_scale_of(x):
    """The oracle's state whose scale is the one of x itself."""
    return oracle.State(np.array([oracle.amax(x), 0, 0, 0], np.float32), np.float32(1))


@pytest.mark.parametrize("margin", [0, 1])
def test_scales_of_the_tensors_at_hand(margin):
    """Without state a product is what delayed scaling gives when every history holds the tensor's own amax."""
    recipe = jaxfp8.DelayedScaling(amax_history_len=4, margin=margin)
    x, kernel, grad = operands()

    def product(x, kernel):
        return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=STATELESS)

    y, vjp = jax.vjp(product, x, kernel)
    dx, dkernel = vjp(grad)
    state = oracle.LayerState(*(with_scale_of(a) for a in (x, kernel, grad)))
    expected = oracle.dense_step(x, kernel, grad, state, oracle.Options(margin=margin))
    expected.check(y=y, dgrad=dx, wgrad=dkernel)


@pytest.mark.parametrize("x_batched", [False, True])
def test_a_batch_of_kernels_is_a_loop(x_batched):
    """Kernels of a batch have scales of their own, however far apart they are; x alone shares one over its batch."""
    x, kernel, grad = operands()
    sizes = np.float32([1, 2.0**-26, 2.0**20])
    kernels, xs = sizes[:, None, None] * kernel, sizes[::-1, None, None] * x

    def product(x, kernel):
        return jaxfp8.dot_general(x, kernel, MATMUL, recipe=jaxfp8.DelayedScaling(), state=STATELESS)

    def step(x, kernel):
        y, vjp = jax.vjp(product, x, kernel)
        return y, *vjp(jnp.asarray(grad))

    axes = (0 if x_batched else None, 0)
    operand = xs if x_batched else x
    y, vjp = jax.vjp(jax.vmap(product, in_axes=axes), operand, kernels)
    dx, dkernels = vjp(jnp.stack([grad] * len(sizes)))
    for i in range(len(sizes)):
        expected = step(operand[i] if x_batched else x, kernels[i])
        got = (y[i], dx[i] if x_batched else expected[1], dkernels[i])
        for a, b, what in zip(got, expected, ("y", "dx", "dkernel"), strict=True):
            oracle.assert_bitwise(a, np.asarray(b), f"{what} {i}")
