"""Mutants of fused inputs must fail the comparisons of their tests; the package as it is must not."""

import dataclasses

import pytest
from fused import cases
from jax import lax
from programs import known_amax

from jaxfp8 import ops
from jaxfp8.dot import _fused_input, _gemms
from jaxfp8.ops import _quantize_activation, _quantize_norm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_traced")]


def compare() -> None:
    for name in ("gelu", "silu_gated", "rms", "layer with bias"):
        case, state = cases.CASES[name], known_amax.used_state()
        operands, (kernel, grad) = cases.operands(case), cases.kernel_and_grad()
        cases.check_step(
            case, operands, kernel, grad, state, cases.step(case, operands, kernel, grad, cases.pack(state))
        )


def attribute(owner, name, mutant):
    """`mutant(original)` in its place."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, mutant(getattr(owner, name)))


def swapped(x):
    return lax.rev(x, (x.ndim - 2,))


def swap(original):
    """Gate and up, in the codes alone or in the value alone."""

    def mutant(x, *arguments, activation, **options):
        return original(
            swapped(x) if activation.endswith("_gated") else x, *arguments, activation=activation, **options
        )

    return mutant


def another(original):
    """An activation that is close to the one asked for."""
    other = {"gelu": "silu", "silu_gated": "gelu_gated"}
    return lambda x, *arguments, activation, **options: original(
        x, *arguments, activation=other.get(activation, activation), **options
    )


def without_epsilon(original):
    return lambda *arguments, epsilon, **options: original(*arguments, epsilon=1e-6, **options)


def without_bias(original):
    return lambda x, scale, bias, *arguments, **options: original(x, scale, None, *arguments, **options)


def stopped(function, fp8_residual, *operands):
    del fp8_residual
    return lax.stop_gradient(function(*operands))


def change(**values):
    """Fields of the codes."""

    def mutant(original):
        def codes(*arguments):
            q = original(*arguments)
            return dataclasses.replace(q, **{name: of(q) for name, of in values.items()})

        return codes

    return mutant


def forgets_the_amax(q):
    return dataclasses.replace(q.step, amax=0 * q.step.amax)


MUTANTS = {
    "codes: gate and up swapped": attribute(_quantize_activation, "quantize_activation_with", swap),
    "gradient: gate and up swapped": attribute(ops, "activate", swap),
    "codes: another activation": attribute(_quantize_activation, "quantize_activation_with", another),
    "gradient: another activation": attribute(ops, "activate", another),
    "codes: another epsilon": attribute(_quantize_norm, "quantize_norm_with", without_epsilon),
    "gradient: another epsilon": attribute(ops, "normalize", without_epsilon),
    "codes: no bias": attribute(_quantize_norm, "quantize_norm_with", without_bias),
    "gradient: no bias": attribute(ops, "normalize", without_bias),
    "an amax is forgotten": attribute(_gemms, "quantize_fused", change(step=forgets_the_amax)),
    "codes have another scale": attribute(_gemms, "quantize_fused", change(scale_inv=lambda q: 1.25 * q.scale_inv)),
    "the gradient is not passed on": attribute(_fused_input, "_value", lambda _: stopped),
}


@pytest.fixture
def forgets_functions():
    """The functions of the gradient are cached by name."""
    for cached in (_fused_input._activate, _fused_input._normalize):
        cached.cache_clear()
    yield
    for cached in (_fused_input._activate, _fused_input._normalize):
        cached.cache_clear()


@pytest.mark.usefixtures("forgets_functions")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(monkeypatch, mutant):
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(AssertionError):
        compare()
