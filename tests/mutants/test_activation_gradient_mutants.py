"""Mutants of the gradient behind an activation must fail the comparisons of products; the package as it is must not."""

import dataclasses

import pytest
from fused.cases import BF16
from fused.test_gradients import test_steps as compare

from jaxfp8.dot import _fused_input, _gemms, _product

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_traced")]


def rounded_first(original):
    """The plain path: the gradient in bf16, and then its codes."""

    def mutant(quantizer, grad, step, options):
        is_fused = isinstance(grad, _fused_input.ActivationGradient)
        return original(quantizer, grad.value if is_fused else grad, step, options)

    return mutant


def without_derivative(original):
    """The cotangent of the values, as if the function were its own derivative."""
    return lambda y, grad, *arguments, **options: original(y, grad * 0 + 1, *arguments, **options)


def forgets_the_amax(original):
    def mutant(*arguments):
        q, dbias = original(*arguments)
        return dataclasses.replace(q, step=dataclasses.replace(q.step, amax=0 * q.step.amax)), dbias

    return mutant


def forgets_the_bias(original):
    def mutant(*arguments):
        q, dbias = original(*arguments)
        return q, 0 * dbias

    return mutant


def forgets_the_activation(original):
    return lambda product, y, *cotangents: original(product, y * 0, *cotangents)


MUTANTS = {
    "rounded to bf16 first": (_gemms, "quantize_gradient", rounded_first),
    "another gradient": (_fused_input, "quantize_activation_grad_with", without_derivative),
    "an amax is forgotten": (_gemms, "quantize_gradient", forgets_the_amax),
    "the bias has no gradient": (_gemms, "quantize_gradient", forgets_the_bias),
    "another y": (_product, "_gradient", forgets_the_activation),
}


def test_the_package_passes():
    compare("silu_gated", BF16)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(monkeypatch, mutant):
    owner, name, change = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises(AssertionError):
        compare("silu_gated", BF16)
