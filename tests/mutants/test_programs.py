"""Mutants of how uses combine: each must make the comparison of `programs/` fail, on
the program named.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parametrize import each_row
from programs import functional, known_amax, test_readings
from programs.functional import PROGRAMS

import jaxfp8
from jaxfp8 import recipes
from jaxfp8._jax import _compat
from jaxfp8.recipes import _reading

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


class Raw(functional.Functional):
    """`update_state` does not repair what comes back: the cotangent is the next state,
    zeros leave the old one.
    """

    def step(self, kernel, xs, grads):
        value, ((dkernel, state), dx) = self.run((kernel, self.packed), xs, grads)
        self.packed = (
            state
            if any(np.any(leaf) for leaf in jax.tree.leaves(state))
            else self.packed
        )
        return value, dkernel, dx


def compare(name, recipe=known_amax.RECIPES["delayed"]):
    program = PROGRAMS[name]
    differentiate = functional.max_grad if program.cast else jax.value_and_grad
    known_amax.check(Raw, program, recipe, differentiate=differentiate)


def addition(function):
    """The addition of the max dtype replaced by a function of f32 arrays."""

    def install(monkeypatch):
        def add(dtype, x, y):
            return _compat.to_max(
                function(_compat.from_max(x), _compat.from_max(y)), dtype
            )

        monkeypatch.setattr(_compat._MaxRules, "add", staticmethod(add))

    return install


def neutral_element(value):
    def install(monkeypatch):
        def zero(dtype):
            return _compat._MaxRules.full((), value, dtype)

        monkeypatch.setattr(_compat._MaxRules, "zero", staticmethod(zero))

    return install


def cast_at_every_use(monkeypatch):
    """The casts of two uses are two values, so that autodiff adds their cotangents in
    f32.
    """
    monkeypatch.delattr(_compat.OncePrimitive, "bind_with_trace")


def max_grad_forgotten(monkeypatch):
    monkeypatch.setattr(jaxfp8, "max_grad", lambda tree: tree)


MUTANTS = {
    "sum for max, called twice": (addition(jnp.add), "loop"),
    "the last use for max": (addition(lambda x, y: x), "loop"),
    "neutral element -inf": (neutral_element(-jnp.inf), "not taken"),
    "cast at every use": (cast_at_every_use, "loop"),
    "max_grad forgotten": (max_grad_forgotten, "carry"),
}


@each_row("install, program", MUTANTS)
def test_mutant_is_caught(install, program, monkeypatch):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        compare(program)


def without(position):
    """The cotangent of a reading lacks what an operand recorded."""

    def install(monkeypatch):
        def mutant(quantized, *rest, original=_reading.cotangent):
            quantized = list(quantized)
            quantized[position] = None
            return original(quantized, *rest)

        monkeypatch.setattr(_reading, "cotangent", mutant)

    return install


def another_kernels_scale(monkeypatch):
    """The scale that the backward computes again is that of x for the kernel, too."""

    def mutant(quantizers, reading, original=recipes.scales_of_reading):
        scales = original(quantizers, reading)
        return [scales[0], scales[0], scales[2]]

    monkeypatch.setattr(recipes, "scales_of_reading", mutant)


READINGS = {
    "amax of x": (without(0), test_readings.scan),
    "amax of the gradient": (without(2), test_readings.scan),
    "scale of another operand in the backward": (
        another_kernels_scale,
        test_readings.scan,
    ),
}


@each_row("install, loop", READINGS)
def test_mutant_of_a_reading_is_caught(install, loop, monkeypatch):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        test_readings.assert_same_steps(loop, test_readings.DELAYED)
