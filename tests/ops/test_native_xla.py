"""implementation("xla"): the values and the state are those of the other
implementations.

What XLA makes of the programs on an H200 is in `aot/test_xla.py`.
"""

import functools
import re

import jax
import lowering
import numpy as np
import oracle
import pytest

import jaxfp8
from jaxfp8 import ops
from ops import cases

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))
DTYPES = pytest.mark.parametrize(
    "dtype", [oracle.BF16, oracle.F16, np.dtype(np.float32)], ids=["bf16", "f16", "f32"]
)


def step(x, kernel, grad, bias, state, recipe=RECIPE):
    """`(y, (gradients of x, kernel and bias, the next state))`."""

    def product(x, kernel, bias, state):
        return jaxfp8.dot_general(
            x, kernel, ROWS_BY_COLUMNS, recipe=recipe, state=state, bias=bias
        )

    y, vjp = jax.vjp(product, x, kernel, bias, state)
    return y, vjp(grad)


def arguments(dtype, m=24, k=70, n=17):
    x, grad = (
        cases.random_values(shape, dtype, i, spread=1)
        for i, shape in enumerate([(m, k), (m, n)])
    )
    return (
        x,
        cases.random_values((k, n), dtype, 2, spread=1),
        grad,
        cases.random_values((n,), dtype, 3, spread=1),
    )


@DTYPES
def test_three_steps(dtype):
    """The state, bit for bit, is that of other implementations; products lie within the
    bound of the exact ones.
    """
    tensors = arguments(dtype)
    run = jax.jit(step)
    state = wanted = jaxfp8.init_state(RECIPE)
    of_oracle = oracle.LayerState.init(4)
    for size in (1, 4, 0.25):
        x, kernel, grad, bias = (
            np.asarray(tensor * np.asarray(size, dtype)) for tensor in tensors
        )
        with ops.implementation("xla"):
            y, (dx, dkernel, _, state) = run(x, kernel, grad, bias, state)
        _, (*_, wanted) = run(x, kernel, grad, bias, wanted)
        jax.tree.map(
            functools.partial(oracle.assert_bitwise, what=f"state, {size}"),
            state,
            jax.device_get(wanted),
        )
        dtypes = {"out_dtype": dtype, "dgrad_dtype": dtype, "wgrad_dtype": dtype}
        exact = oracle.dense_step(x, kernel, grad, of_oracle, bias=bias, **dtypes)
        of_oracle = exact.state
        exact.check(y=y, dgrad=dx, wgrad=dkernel)
    assert np.unique(state.input.amax_history).size == 4, (
        "amaxes of three steps and a zero"
    )


def cuda_text(function, *arguments) -> str:
    with ops.implementation("xla"):
        return lowering.cuda_text(function, *arguments)


def dots(text) -> list:
    """`(dtype of the operands, dtype of the result, precision)` of each product."""
    found = []
    for line in re.findall(r"stablehlo.dot_general .*", text):
        a, b, out = re.findall(r"((?:bf|f)\d+)>", line.split(" : ")[-1])
        assert a == b
        found.append((a, out, re.search(r"precision = \[(\w+),", line)[1]))
    return sorted(found)


@DTYPES
def test_products_on_gpus(dtype):
    """In bfloat16 where the result is, else in float32; precise ones say so."""
    wide = "bf16" if dtype == oracle.BF16 else "f32"
    text = cuda_text(step, *arguments(dtype), jaxfp8.init_state(RECIPE))
    assert dots(text) == [
        (wide, wide, "DEFAULT"),
        (wide, wide, "HIGHEST"),
        (wide, wide, "HIGHEST"),
    ]
    # On a CPU nothing rewrites the pattern, and bfloat16 would round its operands.
    with ops.implementation("xla"):
        text = (
            jax.jit(step).lower(*arguments(dtype), jaxfp8.init_state(RECIPE)).as_text()
        )
    assert {(a, out) for a, out, _ in dots(text)} == {("f32", "f32")}


def test_without_an_fp8_product():
    """cuBLASLt does not multiply E5M2 by E5M2: the codes, which f32 and TF32 hold, are
    multiplied, then scaled.
    """
    recipe = jaxfp8.DelayedScaling(amax_history_len=4, fp8_format=jaxfp8.Format.E5M2)
    tensors = arguments(oracle.BF16)
    text = cuda_text(
        functools.partial(step, recipe=recipe), *tensors, jaxfp8.init_state(recipe)
    )
    assert {(a, out) for a, out, _ in dots(text)} == {("f32", "f32")}
    a = cases.random_codes((6, 33), oracle.E5M2, 1)
    b = cases.random_codes((7, 33), oracle.E5M2, 2)
    scale = np.float32(1e-6)
    with ops.implementation("xla"):
        got = ops.scaled_matmul(a, b, scale, scale)
    oracle.scaled_matmul(a, b, scale, scale, out_dtype=oracle.BF16).check(got)
