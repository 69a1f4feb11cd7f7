"""Fused inputs in float64: what a product of an activation or a norm gives, forward and
backward, and how far f32 is.

Formulas and derivatives are written from their definitions. Codes are only used where
every f32 value within its bound has the same one, so that the products of the oracle
apply.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import oracle
from oracle import gradients as oracle_gradients
from programs.cases import MATMUL as MATMUL, assert_state as assert_state, pack as pack
from programs.known_amax import HISTORY

import jaxfp8

ROWS, INNER, OUT = 6, 16, 5
RECIPE = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
CLAMPED = jaxfp8.ops.ClampedSwiGLU(2.0, alpha=1.702, offset=1.0)
F32, BF16, F16 = np.dtype(np.float32), oracle.BF16, oracle.F16
EPSILON = 0.25  # as large as what it is added to, so that it matters

_U = 2.0**-24
_ROUNDING = {F32: 0.0, BF16: 2.0**-8, F16: 2.0**-11}
_SMALLEST = {F32: 2.0**-126, BF16: 2.0**-126, F16: 2.0**-25}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of fused input.

    Attributes:
        fuse: operands -> what `dot_general` takes.
        values: numpy operands -> oracle.Values.
        gradients: `(operands, Product of the gradient of the values) -> (exact, bound)
            of each operand`.
        shapes: of the operands but for the rows of the first.
    """

    fuse: Callable
    values: Callable
    gradients: Callable
    shapes: tuple


def _activation_gradients(name, operands, cotangent):
    values = oracle_gradients.activation(
        operands[0], cotangent.exact, name, cotangent.bound
    )
    return [(values.exact, values.bound)]


def _norm_gradients(kind, operands, cotangent):
    """With r = 1 / sqrt(mean(c^2) + epsilon), t = gamma dh: dc = r t - c r^3 mean(c t);
    for "layer" dx = dc - mean(dc).

    The bound: each number is a sum of at most three parts, themselves products of at
    most seven factors with relative errors of no more than (n + 4) u each, of
    magnitudes in which |c| counts as |x| + mean|x|. Sums over rows add as many
    roundings as there are rows.
    """
    x, gamma = (oracle.widen(operand, np.float64) for operand in operands[:2])
    n = x.shape[-1]
    dh, size = cotangent.exact, np.abs(cotangent.exact) + cotangent.bound

    def mean(v):
        return v.mean(axis=-1, keepdims=True)

    c = x - mean(x) if kind == "layer" else x
    c_size = np.abs(x) + mean(np.abs(x)) if kind == "layer" else np.abs(x)
    r = 1 / np.sqrt(mean(c * c) + EPSILON)

    def of(t):
        dc = r * t - c * r**3 * mean(c * t)
        return dc - mean(dc) if kind == "layer" else dc

    def of_size(t):
        dc = r * t + c_size * r**3 * mean(c_size * t)
        return dc + mean(dc) if kind == "layer" else dc

    relative = 7 * (n + 4) * _U
    t_size, t_bound = size * np.abs(gamma), cotangent.bound * np.abs(gamma)
    found = [(of(dh * gamma), of_size(t_bound) + relative * of_size(t_size))]
    relative += len(x) * _U
    found.append(
        (
            (dh * c * r).sum(0),
            (cotangent.bound * np.abs(c) * r).sum(0)
            + relative * (size * c_size * r).sum(0),
        )
    )
    if len(operands) == 3:
        found.append((dh.sum(0), cotangent.bound.sum(0) + relative * size.sum(0)))
    return found


def _activation(name):
    return Case(
        fuse=lambda x: jaxfp8.activated(x, name),
        values=lambda x: oracle.activation(x, name),
        gradients=functools.partial(_activation_gradients, name),
        shapes=((2, INNER) if jaxfp8.ops.is_gated(name) else (INNER,),),
    )


def _norm(kind, has_bias):
    return Case(
        fuse=lambda *operands: jaxfp8.normalized(*operands, kind=kind, epsilon=EPSILON),
        values=lambda x, gamma, beta=None: oracle.norm(x, gamma, beta, kind, EPSILON),
        gradients=functools.partial(_norm_gradients, kind),
        shapes=((INNER,),) * (2 + has_bias),
    )


CASES = {
    name: _activation(name)
    for name in ("relu", "silu", "gelu", "silu_gated", "gelu_gated")
}
CASES |= {
    "clamped": _activation(CLAMPED),
    "rms": _norm("rms", False),
    "layer": _norm("layer", False),
    "layer with bias": _norm("layer", True),
}


def operands(case, seed=0, dtype=F32, rows=(ROWS,)):
    """Of a case, of sizes near one; x in `dtype`, parameters of a norm in f32."""
    rng = np.random.default_rng(seed)
    first, *rest = case.shapes
    x = (2 * rng.standard_normal((*rows, *first)) + 0.5).astype(F32).astype(dtype)
    return (x, *(rng.standard_normal(shape).astype(F32) for shape in rest))


def kernel_and_grad(seed=0, dtype=F32):
    """kernel f32 `[INNER, OUT]`, and the gradient of y `[ROWS, OUT]` in `dtype`."""
    rng = np.random.default_rng(1000 + seed)
    return rng.standard_normal((INNER, OUT)).astype(F32), rng.standard_normal(
        (ROWS, OUT)
    ).astype(F32).astype(dtype)


def product(fused, kernel, state, dtype=None, recipe=RECIPE):
    """Over the last dimension of `fused`."""
    dimension_numbers = (((len(fused.shape) - 1,), (0,)), ((), ()))
    return jaxfp8.dot_general(
        fused,
        kernel,
        dimension_numbers,
        recipe=recipe,
        state=state,
        preferred_element_type=dtype,
    )


def step(case, operands, kernel, grad, state):
    """`(y, gradients of operands, of kernel, next state)` of the package."""

    @jax.jit
    def run(operands, kernel, state, grad):
        y, vjp = jax.vjp(
            lambda *a: product(case.fuse(*a[0]), *a[1:], dtype=grad.dtype),
            operands,
            kernel,
            state,
        )
        return y, *vjp(grad)

    return run(operands, kernel, state, grad)


def sure_codes(values, scale, fmt):
    """The codes of all f32 values within the bounds, in and after a product with
    `scale`, which must agree.
    """
    ends = []
    for sign in (-1, 1):
        end = (values.exact + sign * values.bound).astype(F32) * scale
        end = oracle.encode(np.nextafter(end, F32.type(sign * np.inf)), fmt)
        # of either sign
        ends.append(np.where(oracle.widen(end) == 0, fmt.dtype.type(0), end))
    oracle.assert_bitwise(
        ends[0], ends[1], "codes that a rounding decides: take another seed"
    )
    return ends[0]


def next_of(state, scale, values, got) -> oracle.State:
    """The next state of a quantizer of values; its amax is the one in `got`, which must
    be that of some values within the bounds.
    """
    top = np.asarray(got.amax_history)[0]
    least, most = (
        np.max(np.abs(values.exact) + sign * values.bound) for sign in (-1, 1)
    )
    assert least * (1 - 2.0**-23) <= top <= most * (1 + 2.0**-23), (
        f"amax {top!r}, expected {least!r} to {most!r}"
    )
    return oracle.next_state(state, scale, top)


def check_step(
    case, operands, kernel, grad, state: oracle.LayerState, got
) -> oracle.LayerState:
    """Compares what `step` gave with the formulas; returns the next state."""
    y, of_operands, dkernel, next_state = got
    values = case.values(*operands)
    scale = oracle.select_scale(state.input, oracle.E4M3)
    codes = sure_codes(values, scale, oracle.E4M3)
    k_codes, _, k_state = oracle.step(kernel, state.kernel, oracle.E4M3)
    g_codes, _, g_state = oracle.step(grad, state.output_grad, oracle.E5M2)
    inverse, dtype = np.float32(1) / scale, operands[0].dtype

    oracle.scaled_matmul(
        codes, k_codes.T, inverse, k_state.scale, out_dtype=grad.dtype
    ).check(y, "y")
    assert y.dtype == grad.dtype
    oracle.scaled_matmul(codes.T, g_codes.T, inverse, g_state.scale).check(
        dkernel, "gradient of kernel"
    )
    dh = oracle.scaled_matmul(
        g_codes, k_codes, g_state.scale, k_state.scale, out_dtype=dtype
    )
    for i, (operand, found, (exact, bound)) in enumerate(
        zip(operands, of_operands, case.gradients(operands, dh), strict=True)
    ):
        assert found.dtype == operand.dtype, f"gradient of operand {i}: {found.dtype}"
        bound = (
            bound
            + _ROUNDING[operand.dtype] * (np.abs(exact) + bound)
            + _SMALLEST[operand.dtype]
        )
        oracle.Product(exact, bound).check(found, f"gradient of operand {i}")

    of_input = next_of(state.input, scale, values, next_state.input)
    expected = oracle.LayerState(of_input, k_state, g_state)
    assert_state(next_state, expected)
    return expected
