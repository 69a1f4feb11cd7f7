"""What the ops and a layer lower to: which custom calls, how many products, how many
passes over each operand.

The CUDA half needs no CUDA library: lowering writes names into a program and loads
nothing.
"""

import re
from collections import Counter

import jax
import numpy as np
import oracle
import pytest
from lowering import cuda_text
from recipes.cases import MATMUL

import jaxfp8
from jaxfp8 import ops
from jaxfp8.inspect import _machine, _op_calls

from . import cases

X = np.ones((6, 10), oracle.BF16)
S = np.float32(1)
E4M3 = cases.dtype_of(oracle.E4M3)
OPS = _op_calls.OPS
# There is no CPU GEMM, and no producer: jnp, then a call.
ON_CPU = {name: {name: 1} for name in cases.TARGETS} | {
    "quantize_activation": {"quantize_transpose": 1},
    "quantize_activation_grad": {"quantize_transpose": 1},
    "quantize_norm": {"quantize_transpose": 1},
    "quantize_pair": {"quantize_transpose": 1},
    "scaled_matmul": {"dequantize": 2},
    "ragged_matmul": {"dequantize": 2},
}
# On a CPU, and under vmap, rows are one array.
ROWS = {f"{verb}_rows": {f"{verb}_histories": 1} for verb in ("read", "write")}
ON_CPU |= ROWS
ON_CUDA = {name: {} if name in cases.CPU_ONLY else {name: 1} for name in OPS}
# XLA leaves out the call whose numbers nobody takes
ON_CUDA["read_rows"] |= ROWS["read_rows"]
TABLE = pytest.mark.parametrize("op", OPS)
RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)


def custom_calls(text: str) -> Counter:
    """The jaxfp8 custom calls of a StableHLO program, by op."""
    return Counter(re.findall(r"custom_call @jaxfp8_(\w+?)_v\d+\b", text))


def product(x, kernel, state=None, recipe=RECIPE):
    return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe, state=state)


def dense_arguments():
    shapes = ((32, 48), (48, 64), (32, 64))
    return *(np.ones(shape, oracle.BF16) for shape in shapes), jaxfp8.init_state(RECIPE)


@TABLE
def test_lowers_to_its_custom_call(op, cuda_custom_calls):
    function, arguments = _op_calls.call(op, _machine.EXAMPLE)
    with ops.implementation("ffi"):
        assert custom_calls(
            jax.jit(function).lower(*arguments).as_text()
        ) == ON_CPU.get(op, {})
    assert custom_calls(cuda_text(function, *arguments)) == ON_CUDA[op]


@TABLE
@pytest.mark.parametrize("name", ["reference", "xla"])
def test_no_custom_calls_elsewhere(op, name, cuda_custom_calls):
    function, arguments = _op_calls.call(op, _machine.EXAMPLE)
    with ops.implementation(name):
        assert "jaxfp8_" not in jax.jit(function).lower(*arguments).as_text()
        assert "jaxfp8_" not in cuda_text(function, *arguments)


@TABLE
def test_vmap_stays_one_custom_call(op, cuda_custom_calls):
    """A batch becomes groups of the same call, not a loop of calls."""
    function, arguments = _op_calls.call(op, _machine.EXAMPLE)
    arguments = [jax.ShapeDtypeStruct((2, 3, *x.shape), x.dtype) for x in arguments]
    on_cuda = custom_calls(cuda_text(jax.vmap(jax.vmap(function)), *arguments))
    assert on_cuda == (ON_CUDA | ROWS)[op]
    with ops.implementation("ffi"):
        text = jax.jit(jax.vmap(jax.vmap(function))).lower(*arguments).as_text()
    assert custom_calls(text) == ON_CPU.get(op, {})


# What is differentiated: how many tensors are written in both layouts, how many
# products there are.
FROZEN = {"x kernel": (3, 3), "x": (1, 2), "kernel": (3, 2), "": (1, 1)}


@pytest.mark.parametrize("wanted", FROZEN)
def test_layouts_that_nobody_reads_are_not_written(wanted, cuda_custom_calls):
    """fprop reads x as it is and the kernel transposed, dgrad the kernel as it is,
    wgrad x and grad transposed.
    """
    x, kernel, grad, state = dense_arguments()
    operands = {"x": x, "kernel": kernel}

    def step(operands_wanted, state):
        def of_both(operands_wanted, state):
            return product(**operands | operands_wanted, state=state)

        y, vjp = jax.vjp(of_both, operands_wanted, state)
        return y, vjp(grad)

    calls = custom_calls(
        cuda_text(step, {name: operands[name] for name in wanted.split()}, state)
    )
    transposed, products = FROZEN[wanted]
    assert calls["scaled_matmul"] == products
    assert (
        calls["quantize_transpose"] == transposed
        and calls["quantize"] == 3 - transposed
    )


def test_counting_is_no_custom_call(cuda_custom_calls):
    """XLA counts, in one reduction of x: two would write the product of every element
    to memory.
    """
    count = jax.jit(lambda x, s: ops.count_saturated_and_flushed(x, s, E4M3))
    for text in (cuda_text(count, X, S), count.lower(X, S).as_text()):
        assert not custom_calls(text)
        assert len(re.findall(r"stablehlo.reduce\(.*tensor<6x10x", text)) == 1


def sizes(call):
    """Those of the amax so far and of the amax of a line that calls quantize."""
    operands, results = (
        re.findall(r"tensor<([^>]*)>", part)
        for part in call.split(" : ")[-1].split("->")
    )
    return operands[2], results[-1]


@pytest.mark.parametrize("name", ["quantize", "quantize_transpose"])
def test_an_amax_that_is_not_there_is_empty(name, cuda_custom_calls):
    """Nothing is copied for the amax so far, and nothing is written for one that a
    fixed scale does not need.
    """
    text = cuda_text(lambda x, s: getattr(ops, name)(x, s, E4M3), X, S)
    (call,) = (line for line in text.splitlines() if f"@jaxfp8_{name}_v" in line)
    assert sizes(call) == ("0xf32", "1xf32") and "output_operand_alias<" not in call
    recipe = jaxfp8.Float8CurrentScaling()
    text = cuda_text(lambda x, k: product(x, k, recipe=recipe), X, X.T)
    calls = [line for line in text.splitlines() if "@jaxfp8_quantize" in line]
    assert list(map(sizes, calls)) == [("0xf32", "0xf32")] * 2


def test_names_carry_a_version():
    """Targets are named jaxfp8_<op>_v<N>, so that an old program never meets a handler
    with another contract.
    """
    assert set(ops.custom_call_targets()) == set(
        (cases.TARGETS | cases.CUDA_TARGETS).values()
    )
