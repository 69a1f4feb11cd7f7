"""Fused inputs in programs: transformations, what is kept for the backward,
what is lowered for CUDA.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import count
from lowering import cuda_text
from programs import functional, known_amax

import jaxfp8

from . import fused_cases as cases
from .fused_cases import BF16, CASES, F32, RECIPE, ROWS

NAMES = ["gelu", "silu_gated", "rms", "layer with bias"]


def use(case, operands, kernel, state, grad):
    """A number whose gradient with respect to y is `grad`."""
    return jnp.sum(cases.product(case.fuse(*operands), kernel, state) * grad)


def all_gradients(function):
    return jax.jit(jaxfp8.grad(function, argnums=(0, 1, 2)))


def uses(case):
    """Operands of another size in each use, stacked; the parameters of a norm are those
    of all.
    """
    draws = [cases.operands(case, seed) for seed in range(3)]
    x = np.stack(
        [operands[0] * np.float32(2.0) ** -i for i, operands in enumerate(draws)]
    )
    return (x, *draws[0][1:]), np.stack(
        [cases.kernel_and_grad(seed)[1] for seed in range(3)]
    )


def check_uses(case, operands, kernel, grads, expected_state, got):
    """Uses of one state are those of all rows at once: codes do not depend on the
    grouping, and amaxes combine by max.

    The gradients of parameters and kernel are sums of sums; the bound of all rows in
    one sum covers them.
    """
    x, *parameters = operands
    rows = (x.reshape(-1, *x.shape[2:]), *parameters)
    (dx, *rest), dkernel, dstate = got
    y = cases.product(case.fuse(*rows), kernel, cases.pack(expected_state))
    flat = grads.reshape(-1, grads.shape[-1])
    cases.check_step(
        case,
        rows,
        kernel,
        flat,
        expected_state,
        (y, (dx.reshape(rows[0].shape), *rest), dkernel, dstate),
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["scan", "vmap"])
def test_several_uses(name, way):
    case = CASES[name]
    kernel, _ = cases.kernel_and_grad()
    state = known_amax.used_state()
    operands, grads = uses(case)

    def of_layer(layer, x, grad):
        parameters, kernel, state = layer
        return use(case, (x, *parameters), kernel, state, grad)

    def total(operands, kernel, state, grads):
        x, *parameters = operands
        return functional.PROGRAMS[way].run(
            of_layer, (parameters, kernel, state), x, grads
        )

    got = all_gradients(total)(operands, kernel, cases.pack(state), grads)
    check_uses(case, operands, kernel, grads, state, got)


@pytest.mark.parametrize("name", NAMES)
def test_residuals(name):
    """The activation's input, its parameters and codes: no values of it, in whatever
    dtype.
    """
    case, rows, inner, out = CASES[name], 512, 256, 128
    shapes = [jax.ShapeDtypeStruct((rows, *case.shapes[0][:-1], inner), BF16)]
    shapes += [jax.ShapeDtypeStruct((inner,), F32)] * (len(case.shapes) - 1)
    kernel, state = jax.ShapeDtypeStruct((inner, out), F32), jaxfp8.init_state(RECIPE)

    def function(operands, kernel, state):
        return cases.product(case.fuse(*operands), kernel, state, BF16)

    kept = count.residual_bytes(function, shapes, kernel, jax.eval_shape(lambda: state))
    codes = rows * inner + inner * out
    of_operands = sum(shape.size * shape.dtype.itemsize for shape in shapes)
    assert 0 <= kept - codes - of_operands < 300  # states and scales


CALL = re.compile(r"custom_call @jaxfp8_(\w+)_v\d+\((.*?)\).*?: \((.*?)\) -> (.*)")


def calls(function, *arguments):
    """`(op, operand types, result types)` of each custom call for CUDA."""
    text = cuda_text(function, *arguments)
    return [(match[1], match[3], match[4]) for match in CALL.finditer(text)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("cuda_custom_calls")
def test_one_custom_call_on_cuda(name):
    """Of the values there are codes alone: no other call sees a tensor of their shape
    that is not FP8.
    """
    case, state = CASES[name], jaxfp8.init_state(RECIPE)
    operands = cases.operands(case, 0, BF16)
    kernel, grad = cases.kernel_and_grad(0, BF16)
    op = (
        "quantize_norm" if name in ("rms", "layer with bias") else "quantize_activation"
    )

    def train(operands, kernel, state):
        return jnp.sum(cases.product(case.fuse(*operands), kernel, state, BF16) * grad)

    found = calls(jax.value_and_grad(train, argnums=(0, 1, 2)), operands, kernel, state)
    assert Counter(call[0] for call in found) == {
        op: 1,
        "quantize_transpose": 2,  # kernel and gradient of y
        "scaled_matmul": 3,
        "delayed_scales": 1,
        "write_histories": 1,
    }
    values = rf"tensor<({ROWS}x1?x?{cases.INNER}|1x{ROWS}x{cases.INNER})x(bf16|f32)>"
    read = [
        call
        for call in found
        if call[0] not in (op, "scaled_matmul") and re.search(values, call[1])
    ]
    assert not read, read
    inference = calls(lambda *a: train(*a), operands, kernel, state)
    assert Counter(call[0] for call in inference)[op] == 1
