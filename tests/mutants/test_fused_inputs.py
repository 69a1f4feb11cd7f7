"""Mutants of fused inputs and of gradients behind an activation must fail the
comparisons of their tests.
"""

import dataclasses

import pytest
from dot import fused_cases as cases, test_fused_gradients as test_gradients
from jax import lax
from programs import known_amax

from jaxfp8 import ops
from jaxfp8.dot import _fused_input, _gemms, _product

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def compare() -> None:
    for name in ("gelu", "silu_gated", "rms", "layer with bias"):
        case, state = cases.CASES[name], known_amax.used_state()
        operands, (kernel, grad) = cases.operands(case), cases.kernel_and_grad()
        cases.check_step(
            case,
            operands,
            kernel,
            grad,
            state,
            cases.step(case, operands, kernel, grad, cases.pack(state)),
        )


def swapped(x):
    return lax.rev(x, (x.ndim - 2,))


def swap(original):
    """Gate and up, in the codes alone or in the value alone."""

    def mutant(x, *arguments, activation, **options):
        return original(
            swapped(x) if activation.endswith("_gated") else x,
            *arguments,
            activation=activation,
            **options,
        )

    return mutant


def another(original):
    """An activation that is close to the one asked for."""
    other = {"gelu": "silu", "silu_gated": "gelu_gated"}
    return lambda x, *arguments, activation, **options: original(
        x, *arguments, activation=other.get(activation, activation), **options
    )


def without_epsilon(original):
    return lambda *arguments, epsilon, **options: original(
        *arguments, epsilon=1e-6, **options
    )


def without_bias(original):
    return lambda x, scale, bias, *arguments, **options: original(
        x, scale, None, *arguments, **options
    )


def stopped(function, fp8_residual, *operands):
    del fp8_residual
    return lax.stop_gradient(function(*operands))


def change(**values):
    """Fields of the codes."""

    def mutant(original):
        def codes(*arguments):
            q = original(*arguments)
            return dataclasses.replace(
                q, **{name: of(q) for name, of in values.items()}
            )

        return codes

    return mutant


def rounded_first(original):
    """The plain path: the gradient in bf16, and then its codes."""

    def mutant(quantizer, grad, step, options):
        is_fused = isinstance(grad, _fused_input.ActivationGradient)
        return original(quantizer, grad.value if is_fused else grad, step, options)

    return mutant


def without_derivative(original):
    """The cotangent of the values, as if the function were its own derivative."""
    return lambda y, grad, *arguments, **options: original(
        y, grad * 0 + 1, *arguments, **options
    )


def forgets_the_amax_of_a_gradient(original):
    def mutant(*arguments):
        q, dbias = original(*arguments)
        return dataclasses.replace(q, recorded=0 * q.recorded), dbias

    return mutant


def forgets_the_bias(original):
    def mutant(*arguments):
        q, dbias = original(*arguments)
        return q, 0 * dbias

    return mutant


def forgets_the_activation(original):
    return lambda product, y, *cotangents: original(product, y * 0, *cotangents)


def forgets_the_amax(q):
    return 0 * q.recorded


MUTANTS = {
    "codes: gate and up swapped": attribute(ops, "quantize_activation", swap),
    "gradient: gate and up swapped": attribute(ops, "activate", swap),
    "codes: another activation": attribute(ops, "quantize_activation", another),
    "gradient: another activation": attribute(ops, "activate", another),
    "codes: another epsilon": attribute(ops, "quantize_norm", without_epsilon),
    "gradient: another epsilon": attribute(ops, "normalize", without_epsilon),
    "codes: no bias": attribute(ops, "quantize_norm", without_bias),
    "gradient: no bias": attribute(ops, "normalize", without_bias),
    "an amax is forgotten": attribute(
        _gemms, "quantize_fused", change(recorded=forgets_the_amax)
    ),
    "codes have another scale": attribute(
        _gemms, "quantize_fused", change(scale_inv=lambda q: 1.25 * q.scale_inv)
    ),
    "the gradient is not passed on": attribute(
        _fused_input, "_value", lambda _: stopped
    ),
}
# Of the gradient behind an activation.
GRADIENT_MUTANTS = {
    "rounded to bf16 first": attribute(_gemms, "quantize_gradient", rounded_first),
    "another gradient": attribute(ops, "quantize_activation_grad", without_derivative),
    "the gradient's amax is forgotten": attribute(
        _gemms, "quantize_gradient", forgets_the_amax_of_a_gradient
    ),
    "the bias has no gradient": attribute(
        _gemms, "quantize_gradient", forgets_the_bias
    ),
    "another y": attribute(_product, "_gradient", forgets_the_activation),
}


@pytest.fixture
def forgets_functions():
    """The functions of the gradient are cached by name."""
    for cached in (_fused_input._activate, _fused_input._normalize):
        cached.cache_clear()
    yield
    for cached in (_fused_input._activate, _fused_input._normalize):
        cached.cache_clear()


def compare_gradients() -> None:
    test_gradients.test_steps("silu_gated", cases.BF16)


@pytest.mark.usefixtures("forgets_functions")
@pytest.mark.parametrize("mutant", [*MUTANTS, *GRADIENT_MUTANTS])
def test_mutant_is_caught(monkeypatch, mutant):
    (MUTANTS | GRADIENT_MUTANTS)[mutant](monkeypatch)
    with pytest.raises(AssertionError):
        compare() if mutant in MUTANTS else compare_gradients()
