"""Inference: no state in the variables, or scales that are given."""

import flax.linen as nn
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
    expected.y.check(y)
    expected.dgrad.check(dx)
    expected.wgrad.check(dkernel)


def test_linen_without_the_collection():
    x = operands(size=3e4)[0]
    model = nn.Dense(N, use_bias=False, dot_general_cls=jaxfp8.Fp8DotGeneral)
    variables = model.init(jax.random.key(0), x)
    y = model.apply({"params": variables["params"]}, x)
    recipe = jaxfp8.DelayedScaling()
    kernel = variables["params"]["kernel"]
    np.testing.assert_array_equal(y, jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=STATELESS))
    saturated = model.apply(variables, x)  # with fresh state the scale is 1, and data above 448 saturates
    assert np.abs(y - x @ kernel).mean() < 0.1 * np.abs(saturated - x @ kernel).mean()


def test_given_scales():
    """A state with empty histories is its scales: calibrated, stored, used as they are."""
    x, kernel, _ = operands()
    given = [np.float32(oracle.amax(a) / 448) for a in (x, kernel)]
    recipe = jaxfp8.DelayedScaling(amax_history_len=1)
    state = jaxfp8.init_state(recipe)
    state = jaxfp8.DotGeneralState(
        *(
            jaxfp8.QuantizerState(part.amax_history, jnp.full(1, scale))
            for part, scale in zip((state.input, state.kernel), given, strict=True)
        ),
        state.output_grad,
    )
    y = jax.jit(lambda x, kernel: jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state))(x, kernel)
    empty = np.zeros(1, np.float32)
    expected = oracle.dense_step(
        x,
        kernel,
        np.zeros((M, N), np.float32),
        oracle.LayerState(*(oracle.State(empty, scale) for scale in given), oracle.State(empty, np.float32(1))),
    )
    expected.y.check(y)


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


def test_plain_functions_ask_for_a_state():
    x, kernel, _ = operands()
    with pytest.raises(ValueError, match=r"dot_general: state: .*DotGeneralState\(None, None, None\)"):
        jaxfp8.dot_general(x, kernel, MATMUL, recipe=jaxfp8.DelayedScaling())
