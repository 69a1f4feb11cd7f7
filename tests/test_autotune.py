"""autotune without a GPU: which products it finds in a program, the report, and the error. cuda/ runs all of it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8
from jaxfp8 import ops
from jaxfp8.autotune._autotune import gemms_of
from jaxfp8.ops._plans import Gemm

E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
ONE = np.ones(1, np.float32)
WORKSPACE, ALIGNMENT = 32 << 20, 256


def of_shape(*shape, dtype=jnp.float8_e4m3fn):
    return jax.ShapeDtypeStruct(shape, dtype)


def gemm(batch, m, n, k, a=E4M3, b=E4M3, out="bf16", has_bias=False, accumulate=False, precise=False):
    return Gemm(batch, m, n, k, a, b, out, has_bias, accumulate, precise, WORKSPACE, ALIGNMENT)


@pytest.fixture(autouse=True)
def _as_with_the_library(cuda_custom_calls):
    pass


def product(a, b, scale=ONE, **options):
    return ops.scaled_matmul(a, b, scale, ONE, **options)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["function", "jitted"])
def test_options(wrap):
    """Shapes are padded to multiples of 16, as the custom call gets them; bias and accumulator where it adds them."""

    def program(a, b, c, bias, accumulator):
        return (
            product(a, b),
            product(a, b, out_dtype=jnp.float16, precise=True),
            product(a, c, bias=bias),
            product(c, a, out_dtype=jnp.float32, accumulator=accumulator),
            product(a, b),
        )

    operands = of_shape(30, 40), of_shape(50, 40), of_shape(64, 40, dtype=jnp.float8_e5m2)
    extras = of_shape(64, dtype=jnp.bfloat16), of_shape(64, 30, dtype=jnp.float32)
    assert gemms_of(wrap(program), *operands, *extras) == [
        gemm(1, 32, 64, 48),
        gemm(1, 32, 64, 48, out="f16", precise=True),
        gemm(1, 32, 64, 48, b=E5M2, has_bias=True),
        gemm(1, 64, 32, 48, a=E5M2, out="f32", accumulate=True),
    ]


def test_groups():
    """A batch with one scale is one product, also under vmap; members with scales of their own are by themselves."""
    a, b, scales = of_shape(3, 16, 32), of_shape(3, 48, 32), of_shape(3, 1, dtype=jnp.float32)
    assert gemms_of(lambda a, b: product(a, b, batch=1), a, b) == [gemm(3, 16, 48, 32)]
    assert gemms_of(jax.vmap(product), a, b) == [gemm(3, 16, 48, 32)]
    assert gemms_of(jax.vmap(product), a, b, scales) == [gemm(1, 16, 48, 32)]
    batches = of_shape(3, 5, 16, 32), of_shape(3, 5, 48, 32)
    assert gemms_of(jax.vmap(lambda *x: product(*x, batch=1)), *batches, scales) == [gemm(5, 16, 48, 32)]


def test_inside_of_loops_and_calls():
    def program(a, b):
        @jax.jit
        def inner(b):
            return product(a, b, out_dtype=jnp.float32)

        def body(total, _):
            return total + jax.lax.cond(total[0, 0] > 0, inner, lambda b: jnp.zeros((16, 48)), b), None

        return jax.lax.scan(body, jnp.zeros((16, 48)), None, length=3)[0]

    assert gemms_of(program, of_shape(16, 32), of_shape(48, 32)) == [gemm(1, 16, 48, 32, out="f32")]


def test_training_step():
    """fprop fast, dgrad and wgrad precise, e5m2 for the gradient; concrete arguments and keywords do as well."""

    def step(kernel, state, *, x):
        def loss(kernel):
            dims = (((1,), (0,)), ((), ()))
            y = jaxfp8.dot_general(x, kernel, dims, recipe=RECIPE, state=state, preferred_element_type=jnp.bfloat16)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        with warnings.catch_warnings(action="ignore"):  # the state stays what it is
            return jax.grad(loss)(kernel)

    x = of_shape(64, 32, dtype=jnp.bfloat16)
    assert gemms_of(step, np.ones((32, 128), np.float32), jaxfp8.init_state(RECIPE), x=x) == [
        gemm(1, 64, 128, 32),
        gemm(1, 32, 128, 64, b=E5M2, out="f32", precise=True),
    ]


def test_nnx():
    """Modules as arguments, under `nnx.jit` and without."""
    layer = nnx.Linear(64, 32, rngs=nnx.Rngs(0), dot_general=jaxfp8.nnx.Fp8DotGeneral())
    wanted = nnx.DiffState(0, nnx.Any(nnx.Param, jaxfp8.nnx.OverwriteWithGradient))
    step = nnx.grad(lambda layer, x: jnp.sum(layer(x) ** 2), argnums=wanted)
    products = [gemm(1, 16, 32, 64, out="f32"), gemm(1, 64, 32, 16, b=E5M2, out="f32", precise=True)]
    for function in (step, nnx.jit(step)):
        assert gemms_of(function, layer, of_shape(16, 64, dtype=jnp.float32)) == products


def test_without_a_gpu():
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError:
        with pytest.raises(RuntimeError, match="autotune: needs an NVIDIA GPU to measure on"):
            jaxfp8.autotune(product, of_shape(16, 32), of_shape(48, 32))
    else:
        pytest.skip("there is a GPU")


def test_without_the_library(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: ["a GPU"])
    monkeypatch.setattr(ops._ffi, "_has_cuda_kernels", False)
    with pytest.raises(RuntimeError, match="autotune: the CUDA module of jaxfp8 is not loaded: "):
        jaxfp8.autotune(product, of_shape(16, 32), of_shape(48, 32))
