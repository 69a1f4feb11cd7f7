"""Mutants of the fused producers must fail the comparisons of their tests; the package
as it is must not.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from oracle import E4M3, F32, gradients as oracle_gradients

from jaxfp8 import ops
from jaxfp8.ops import _quantize_activation, _quantize_norm, _shapes

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def activation_inputs(rng):
    """`(activation, x)` of each activation."""
    clamped = ops.ClampedSwiGLU(1.5, alpha=1.702, offset=1.0)
    for name in (*ops.ACTIVATIONS, clamped):
        shape = (64, 2, 128) if ops.is_gated(name) else (64, 128)
        x = (3 * rng.standard_normal(shape)).astype(F32)
        if name == clamped:
            x[0] = clamped.limit
        yield name, x


def compare_activations() -> None:
    for name, x in activation_inputs(np.random.default_rng(0)):
        # with the second the tails are what has codes
        for scale in F32([3.3, 2.0**24]):
            with ops.implementation("reference"):
                got = ops.quantize_activation(x, scale, E4M3.dtype, activation=name)
            oracle.activation(x, name).check(
                *map(np.asarray, got), scale, E4M3, what=name
            )


def compare_norms() -> None:
    rng = np.random.default_rng(0)
    # Integers, whose sums are exact in f32: `depth` 1, whatever the order.
    x = (2.0**13 + rng.integers(-3, 4, (64, 128))).astype(F32)
    gamma, beta = rng.standard_normal((2, 128)).astype(F32)
    for kind, b in (("rms", None), ("layer", beta)):
        with ops.implementation("reference"):
            got = ops.quantize_norm(
                x, gamma, b, F32(30), E4M3.dtype, kind=kind, epsilon=0.5
            )
        # The squares of "rms" are below 2^27, and their sums rounded.
        values = oracle.norm(x, gamma, b, kind, 0.5, depth=128 if kind == "rms" else 1)
        values.check(*map(np.asarray, got), F32(30), E4M3, what=kind)


def compare_gradients() -> None:
    rng = np.random.default_rng(0)
    for name, x in activation_inputs(rng):
        grad = rng.standard_normal((64, 128)).astype(F32)
        with ops.implementation("reference"):
            got = ops.quantize_activation_grad(
                x, grad, F32(3.3), E4M3.dtype, activation=name
            )
        data, data_t, top = map(np.asarray, got)
        values = oracle_gradients.activation(x, grad, name)
        values = oracle.Values(
            *(part.reshape(64, -1) for part in (values.exact, values.bound))
        )
        codes = data.reshape(64, -1), data_t.reshape(-1, 64), top
        values.check(*codes, F32(3.3), E4M3, what=name)


def function(name, mutant):
    return lambda monkeypatch: monkeypatch.setitem(
        _quantize_activation._FUNCTIONS, name, mutant
    )


def clamp(mutant):
    """`mutant(x, limit)` in place of the clamp from above."""
    return attribute(_quantize_activation, "_at_most", lambda _: mutant)


def clamped_with(**numbers):
    """The formula with other numbers."""

    def install(original):
        def gate(activation, *halves):
            if not isinstance(activation, str):
                activation = dataclasses.replace(activation, **numbers)
            return original(activation, *halves)

        return gate

    return attribute(_quantize_activation, "_gate", install)


@jax.custom_jvp
def cut_straight_through(x, limit):
    return jnp.minimum(x, limit)


cut_straight_through.defjvp(
    lambda primals, tangents: (cut_straight_through(*primals), tangents[0])
)


def values(module, name, change):
    """The f32 values, changed before they are quantized."""

    return attribute(
        module, name, lambda original: lambda *arguments: change(original(*arguments))
    )


def statistics(mutant):
    return attribute(_quantize_norm, "_statistics", lambda _: mutant)


def rounded_to_bf16(h):
    return h.astype(jnp.bfloat16).astype(jnp.float32)


def fast_variance(x, kind, epsilon):
    mean = jnp.mean(x, axis=-1, keepdims=True) * float(kind == "layer")
    variance = jnp.mean(x * x, axis=-1, keepdims=True) - mean * mean
    return lax.rsqrt(variance + epsilon), mean


def epsilon_outside(x, kind, epsilon):
    mean = jnp.mean(x, axis=-1, keepdims=True) * float(kind == "layer")
    return 1 / (
        jnp.sqrt(jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)) + epsilon
    ), mean


def without_mean(x, kind, epsilon):
    del kind
    return [lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + epsilon)]


def with_parameters_swapped(affine):
    return lambda x, statistics, parameters: affine(x, statistics, parameters[::-1])


def own_derivative(x, grad, activation):
    del activation
    return x * (grad[:, None] if x.ndim == 3 else grad)


def clipped_amax(x, vmap_dims):
    del vmap_dims
    return jnp.max(jnp.abs(jnp.clip(x, -2, 2))).reshape(1)


# The amax after saturation.
amax_of_codes = attribute(_shapes, "abs_max", lambda _: clipped_amax)
ACTIVATION_MUTANTS = {
    "gelu by erf": function("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu that cancels": function("gelu", jax.nn.gelu),
    "silu of 1.702 x": function("silu", lambda x: x * lax.logistic(1.702 * x)),
    "leaky relu": function("relu", lambda x: jnp.where(x <= 0, 0.01 * x, x)),
    "square of x": function("relu_squared", lambda x: x * x),
    "no clamp from above": clamp(lambda x, limit: x),
    "no alpha": clamped_with(alpha=1.0),
    "no offset": clamped_with(offset=0.0),
    "a rounding to bf16": values(_quantize_activation, "_activate", rounded_to_bf16),
    "amax of what is left": amax_of_codes,
}
GRADIENT_MUTANTS = {
    "silu of 1.702 x": function("silu", lambda x: x * lax.logistic(1.702 * x)),
    "leaky relu": function("relu", lambda x: jnp.where(x <= 0, 0.01 * x, x)),
    "square of x": function("relu_squared", lambda x: x * x),
    "straight through the clamp": clamp(cut_straight_through),
    "half of it at the limit": clamp(jnp.minimum),
    "a rounding to bf16": values(
        _quantize_activation, "activation_grad", rounded_to_bf16
    ),
    "gate and up swapped": values(
        _quantize_activation, "activation_grad", lambda dx: dx[:, ::-1]
    ),
    "the activation is its own derivative": attribute(
        _quantize_activation, "activation_grad", lambda _: own_derivative
    ),
    "amax of what is left": amax_of_codes,
}
NORM_MUTANTS = {
    "E[x^2] - E[x]^2": statistics(fast_variance),
    "epsilon outside of the root": statistics(epsilon_outside),
    "no mean": statistics(without_mean),
    "gamma and beta swapped": attribute(
        _quantize_norm, "_affine", with_parameters_swapped
    ),
    "a rounding to bf16": values(_quantize_norm, "_affine", rounded_to_bf16),
    "amax of what is left": amax_of_codes,
}


COMPARED = [
    *((mutant, compare_activations) for mutant in ACTIVATION_MUTANTS.values()),
    *((mutant, compare_gradients) for mutant in GRADIENT_MUTANTS.values()),
    *((mutant, compare_norms) for mutant in NORM_MUTANTS.values()),
]


@pytest.mark.parametrize(
    "install, compare",
    COMPARED,
    ids=[*ACTIVATION_MUTANTS, *GRADIENT_MUTANTS, *NORM_MUTANTS],
)
def test_mutant_is_caught(monkeypatch, install, compare):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        compare()
