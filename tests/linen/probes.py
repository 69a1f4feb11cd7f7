"""What the tests of Linen's layers share; programs whose every amax is known are in `programs/`."""

import functools

import jax
from equality import assert_same_bits
from programs.known_amax import OWN, RECIPES, USES as USES, N as N, Program, check, leaves
from programs.linen import Linen

import jaxfp8

RECIPE = RECIPES["delayed"].recipe
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
FP8 = functools.partial(jaxfp8.Fp8DotGeneral, recipe=RECIPE)
GRADIENTS = {jax.grad: jax.value_and_grad, jaxfp8.grad: jaxfp8.value_and_grad}


def assert_state(variables, expected, what):
    """Bitwise; `variables` are those of one `Fp8DotGeneral_0`."""
    assert_same_bits(dict(variables), leaves(expected), what)


def train(module, rows, *, transform=jaxfp8.grad, steps=3):
    """Check some steps of `module(total, (xs, grads))`, which has one Dense: with `rows` a kernel and state a use."""
    check(Linen, Program(module, own=OWN if rows else ()), differentiate=GRADIENTS[transform], steps=steps)
