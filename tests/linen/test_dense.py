"""linen.Dense: nn.Dense's parameters, but the f32 kernel is quantized as it is and its
gradient comes in f32.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from draws import KEY, normal
from programs.known_amax import RECIPES

import jaxfp8
from jaxfp8.linen import Dense

RECIPE, OWG = RECIPES["delayed"].recipe, jaxfp8.OVERWRITE_WITH_GRADIENT

M, K, N = 9, 14, 11
F32, BF16, F16 = np.dtype(np.float32), oracle.BF16, oracle.F16


def program(layer):
    x, grad = jnp.ones((M, K), BF16), jnp.ones((M, N), BF16)
    variables = layer.init(KEY, x)
    step = jax.jit(
        lambda variables, x, grad: jax.vjp(layer.apply, variables, x)[1](grad)
    )
    return step.lower(variables, x, grad).as_text()


def kernel_conversions(text):
    """Conversions of an array of the kernel's shape, `(from, to)`, in a StableHLO
    program.
    """
    of_kernel = (
        rf"stablehlo\.convert [^\n]*tensor<{K}x{N}x(\w+)>\) -> tensor<{K}x{N}x(\w+)>"
    )
    return set(re.findall(of_kernel, text))


def test_no_copy_of_the_kernel_in_the_compute_dtype():
    """nn.Dense rounds the kernel to bf16 and its gradient as well; here no f32 of its
    shape is, only codes widen.
    """
    cls = jaxfp8.make_dot_general_cls(RECIPE)
    theirs = nn.Dense(N, dtype=BF16, dot_general_cls=cls)
    ours = Dense(N, recipe=RECIPE, dtype=BF16)
    assert kernel_conversions(program(theirs)) >= {("f32", "bf16"), ("bf16", "f32")}
    text = program(ours)
    assert kernel_conversions(text) == set()
    in_bf16 = [
        line
        for line in text.splitlines()
        if re.search(rf"-> .*tensor<{K}x{N}xbf16>", line)
    ]
    assert in_bf16 and all("jaxfp8_dequantize" in line for line in in_bf16)
    assert f"tensor<{K}x{N}xf32>" in text


@pytest.mark.parametrize("param_dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("x_dtype", [F32, BF16, F16, np.dtype(np.int32)], ids=str)
def test_dtypes_are_those_of_nn_dense(x_dtype, dtype, param_dtype):
    x = jax.ShapeDtypeStruct((M, K), x_dtype)
    options = {"dtype": dtype, "param_dtype": param_dtype}
    with jax.numpy_dtype_promotion("standard"):  # nn.Dense promotes
        y, _ = jax.eval_shape(nn.Dense(N, **options).init_with_output, KEY, x)
    got, variables = jax.eval_shape(
        Dense(N, recipe=RECIPE, **options).init_with_output, KEY, x
    )
    assert (got.shape, got.dtype) == (y.shape, y.dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables["params"])} == {
        param_dtype
    }


@pytest.mark.parametrize(
    "x_dtype, dtype",
    [(F32, BF16), (BF16, F32), (BF16, F16), (np.dtype(np.int32), None)],
    ids=str,
)
def test_x_arrives_in_the_compute_dtype(x_dtype, dtype):
    """Narrowed where the compute dtype is narrower; a wider one changes no code."""
    x = (20 * normal(M, K)).astype(x_dtype)
    layer = Dense(N, recipe=RECIPE, dtype=dtype, use_bias=False)
    variables = layer.init(KEY, x)
    arrives = x.astype(dtype or F32)
    state = jax.jit(jax.grad(lambda v: jnp.sum(layer.apply(v, x).astype(F32))))(
        variables
    )[OWG]["Fp8DotGeneral_0"]
    assert state["input_amax_history"][0] == oracle.amax(arrives)
