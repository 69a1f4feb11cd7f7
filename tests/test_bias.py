"""`dot_general(..., bias=)`: added before the only rounding, its gradient summed in f32, in every transform."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8

F32, BF16, F16 = np.dtype(np.float32), oracle.BF16, oracle.F16
M, K, N = 6, 8, 5
RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)
MATRICES = (((1,), (0,)), ((), ()))


def operands(seed=0, dtype=F32, leading=()):
    rng = np.random.default_rng(seed)
    shapes = ((M, K), (K, N), (N,), (M, N))
    draws = [rng.standard_normal(leading + shape).astype(F32) for shape in shapes]
    return [draw.astype(dtype) for draw in draws]


def product(x, kernel, bias, state, dtype=None):
    return jaxfp8.dot_general(x, kernel, MATRICES, recipe=RECIPE, state=state, bias=bias, preferred_element_type=dtype)


def sum_of_rows(grad, dtype=F32):
    """Summed in f32: M - 1 additions, each rounds a partial sum of at most sum |grad|; then rounded to `dtype`."""
    wide = grad.astype(np.float64).reshape(-1, grad.shape[-1])
    exact, unit = wide.sum(axis=0), {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}[dtype]
    bound = len(wide) * oracle.PRECISE * np.abs(wide).sum(axis=0)
    return oracle.Product(exact, bound + unit * (np.abs(exact) + bound))


@pytest.mark.parametrize("bias_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_values_and_gradient(dtype, bias_dtype):
    x, kernel, bias, grad = operands(1, dtype)
    bias = bias.astype(bias_dtype)
    state = jaxfp8.init_state(RECIPE)
    y, vjp = jax.vjp(lambda *args: product(*args, dtype), x, kernel, bias, state)
    dx, dkernel, dbias, next_state = vjp(grad)
    layer_state = oracle.LayerState.init(3)
    dtypes = {"out_dtype": dtype, "dgrad_dtype": dtype, "wgrad_dtype": dtype}
    expected = oracle.dense_step(x, kernel, grad, layer_state, bias=bias, **dtypes)
    expected.check(y=y, dgrad=dx, wgrad=dkernel)
    assert dbias.dtype == bias_dtype
    sum_of_rows(grad, bias_dtype).check(dbias)
    for name in ("input", "kernel", "output_grad"):
        got, wanted = getattr(next_state, name), getattr(expected.state, name)
        oracle.assert_bitwise(got.amax_history, wanted.amax_history, name)
    without = oracle.dense_step(x, kernel, grad, layer_state, **dtypes)
    with pytest.raises(AssertionError, match="out of bound"):  # the bias matters here
        without.y.check(y)


@pytest.mark.parametrize("shared_state", [True, False])
def test_vmap_over_kernels(shared_state):
    """Experts: a kernel and a bias each; state shared or each its own."""
    x, kernel, bias, grad = operands(6, leading=(3,))
    state = jaxfp8.init_state(RECIPE)
    if not shared_state:
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)

    def loss(kernel, bias, state):
        in_axes = (0, 0, 0, None if shared_state else 0)
        return jnp.vdot(jax.vmap(product, in_axes)(x, kernel, bias, state), grad)

    _, dbias, next_state = jax.grad(loss, argnums=(0, 1, 2))(kernel, bias, state)
    for row in range(3):
        sum_of_rows(grad[row]).check(dbias[row])
    amaxes = np.abs(x).max(axis=(1, 2))
    got = np.asarray(next_state.input.amax_history)[..., 0]
    np.testing.assert_array_equal(got, amaxes.max() if shared_state else amaxes)


def test_errors():
    x, kernel, bias, _ = operands()
    state = jaxfp8.init_state(RECIPE)
    with pytest.raises(ValueError, match=r"dot_general: bias: expected shape \(5,\), got float32\[4\]"):
        product(x, kernel, bias[:4], state)
    with pytest.raises(TypeError, match="dot_general: bias: expected bfloat16"):
        product(x, kernel, bias.astype(np.int32), state)


def test_no_state():
    x, kernel, bias, grad = operands(8)
    none = jaxfp8.DotGeneralState(None, None, None)
    y, vjp = jax.vjp(lambda x, bias: product(x, kernel, bias, none), x, bias)
    bare = product(x, kernel, None, none)
    np.testing.assert_allclose(y, np.asarray(bare) + bias, rtol=0, atol=1e-5)
    sum_of_rows(grad).check(vjp(grad)[1])


def test_zero_rows():
    _, kernel, bias, _ = operands()
    y, vjp = jax.vjp(lambda bias: product(np.zeros((0, K), F32), kernel, bias, jaxfp8.init_state(RECIPE)), bias)
    assert y.shape == (0, N)
    np.testing.assert_array_equal(vjp(y)[0], np.zeros(N))
