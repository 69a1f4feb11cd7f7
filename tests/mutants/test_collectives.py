"""Mutants of collectives must fail the comparisons of their tests, which the package as
it is passes.
"""

import dataclasses

import jax
import pytest
from jax import lax
from mesh import (
    collective_cases as cases,
    test_collectives_of_codes as test_collectives,
    test_wire,
)

from jaxfp8._jax import _compat, _mesh
from jaxfp8.collectives import _collectives
from jaxfp8.recipes import AmaxReduction, HighPrecisionQuantizer

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def numpy(case, recipe, program=cases.loop, check_vma=True):
    return lambda: cases.compare(case, recipe, program, check_vma)


def wire(name):
    return lambda: test_wire.compare(name)


def stages(case):
    return lambda: test_collectives.test_states_of_stages(case, False)


def method(mutant):
    """`mutant(original, self, *arguments)` in place of `move`, which quantizes and
    sends.
    """

    return attribute(
        _collectives._Transfer,
        "move",
        lambda original: lambda *args: mutant(original, *args),
    )


def as_numbers(send, x):
    """Codes as float8, which XLA widens."""
    return send(x)


def backward_as_it_is(original, self, send, quantizer, x, step, dtype):
    is_backward = send == self.collective.send_back
    return original(
        self,
        send,
        HighPrecisionQuantizer() if is_backward else quantizer,
        x,
        step,
        dtype,
    )


def forward_format(original, self, send, quantizer, x, step, dtype):
    del quantizer
    return original(self, send, self.quantizers[0], x, step, dtype)


def forgets_the_amax(original, *arguments):
    source, codes, q = original(*arguments)
    return (
        source,
        codes,
        dataclasses.replace(q, recorded=jax.tree.map(jax.numpy.zeros_like, q.recorded)),
    )


def without_reduction(original):
    """Each device scales by itself, and nobody knows."""

    def mutant(self, amax, state, combine=lax.pmax):
        return amax if state is None else original(self, amax, state, combine)

    return mutant


def scales_stay(original):
    """Scales of rows and blocks do not move with their rows."""
    return lambda send, x: (
        x
        if x.dtype != "float8_e4m3fn" and x.dtype != "float8_e5m2"
        else original(send, x)
    )


def one_scale(original):
    def mutant(self, send, q, data, quantizer):
        return (
            (q.scale_inv, None)
            if q.has_one_scale
            else original(self, send, q, data, quantizer)
        )

    return mutant


def back_as_forth(original):
    """The transpose that does not exchange its axes."""

    def mutant(function, **arguments):
        call = original(function, **arguments)
        calls = mutant.calls = [*getattr(mutant, "calls", []), call]
        return calls[len(calls) - 1 & ~1]

    return mutant


def of_one_device(aval, ct):
    """The cotangent of one device in place of the sum."""
    axes = tuple(_mesh.varying(ct) - _mesh.varying(aval))
    return lax.pmax(ct, axes) if axes else ct


# name -> (what it changes, the comparison that sees it)
MUTANTS = {
    "codes are float8 numbers": (
        attribute(_collectives, "as_bytes", lambda _: as_numbers),
        wire("current"),
    ),
    "the cotangent is not quantized": (method(backward_as_it_is), wire("block")),
    "the cotangent in the forward's format": (
        method(forward_format),
        numpy("all_to_all", "current"),
    ),
    "amaxes are forgotten": (method(forgets_the_amax), numpy("all_to_all", "delayed")),
    "scales are not agreed on": (
        attribute(AmaxReduction, "__call__", without_reduction),
        numpy("all_to_all", "current", check_vma=False),
    ),
    "scales of rows stay": (
        attribute(_collectives, "as_bytes", scales_stay),
        numpy("all_to_all", "rowwise"),
    ),
    "scales of stages stay": (
        attribute(_collectives._Transfer, "send_scales", one_scale),
        stages("all_to_all"),
    ),
    "back as forth": (
        attribute(_collectives, "_call", back_as_forth),
        numpy("all_to_all", "current"),
    ),
    "the state of examples adds": (
        attribute(_collectives, "vmapped_state", lambda _: lambda state, x: state),
        numpy("all_to_all", "delayed", cases.vmap),
    ),
    "the state of uses adds": (
        lambda monkeypatch: monkeypatch.delattr(
            _compat.OncePrimitive, "bind_with_trace"
        ),
        test_collectives.test_two_uses_of_a_replicated_x,
    ),
    "no sum for what is replicated": (
        attribute(_mesh, "cotangent_of", lambda _: of_one_device),
        test_collectives.test_two_uses_of_a_replicated_x,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(monkeypatch, name):
    install, compare = MUTANTS[name]
    install(monkeypatch)
    # JAX has no sum for what the examples of one state record.
    with pytest.raises((AssertionError, ValueError, TypeError)):
        compare()
