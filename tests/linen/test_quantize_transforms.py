"""linen.quantize and Flax's lifted transforms; the model edited by hand is the
reference, bit for bit.
"""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest
from parametrize import each_row
from programs.linen import STACKED

import jaxfp8
from jaxfp8.linen import quantize

from .quantized import (
    KEY,
    OWG,
    A,
    B,
    D,
    assert_same,
    compare_programs,
    compare_training,
    fp8,
    x,
)


def scanned(recipe=None, collections=("params", OWG)):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(D, name="dense", dot_general_cls=fp8(recipe))(x), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = dict.fromkeys(collections, 0)
            scan = nn.scan(
                Body, variable_axes=axes, split_rngs={"params": True}, length=3
            )
            return scan(name="blocks")(x, None)[0]

    return Scanned()


def mapped(recipe=None):
    heads = nn.vmap(nn.Dense, **STACKED)
    return nn.Sequential([heads(5, dot_general_cls=fp8(recipe))])


def test_scan_and_vmap():
    compare_training(quantize(scanned(), [("blocks/dense", A)]), scanned(A), x())
    compare_training(quantize(mapped(), [("layers_0", A)]), mapped(A), x())
    compare_programs(
        quantize(nn.remat(nn.Dense)(5), [("", A)]),
        nn.remat(nn.Dense)(5, dot_general_cls=fp8(A)),
        x(),
    )


def test_scan_without_state():
    """State that nothing carries is an error where it is made, with rules and without;
    some recipes have none.
    """
    for model in (
        quantize(scanned(collections=("params",)), [("blocks/.*", A)]),
        scanned(A, ("params",)),
    ):
        with pytest.raises(
            ValueError,
            match=r"^blocks/dense/.*: DelayedScaling keeps state, .*variable_axes",
        ):
            model.init(KEY, x())
    current = jaxfp8.Float8CurrentScaling()
    plain = scanned(collections=("params",))
    compare_training(
        quantize(plain, [(".*", current)]), scanned(current, ("params",)), x()
    )


def test_rnn():
    """State that is broadcast with the parameters: an amax is the largest of all time
    steps, and of any number.
    """
    with pytest.raises(
        ValueError, match=rf"nn.RNN does, pass variable_broadcast=\('params', '{OWG}'\)"
    ):
        quantize(nn.RNN(nn.SimpleCell(D)), [(".*", A)]).init(KEY, x())
    rnn = quantize(
        nn.RNN(nn.SimpleCell(D), variable_broadcast=("params", OWG)), [(".*", A)]
    )
    variables = rnn.init(KEY, x())
    gradient = jax.jit(jaxfp8.grad(lambda variables, x: rnn.apply(variables, x).sum()))
    for steps in (3, 2):
        batch = steps * x()[:, :steps]
        variables = jaxfp8.update_state(variables, gradient(variables, batch))
        cell = variables[OWG]["cell"]
        assert set(cell) == {"h", "i"}
        assert (
            cell["i"]["Fp8DotGeneral_0"]["input_amax_history"][0] == np.abs(batch).max()
        )


# ------------------------------------------------------------------------------- nn.jit


class Unit(nn.Module):
    """A block; `recipe` is the edit by hand."""

    recipe: object = None

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(D, name="dense", dot_general_cls=fp8(self.recipe))(x)


# One class each: only equal modules of one class share a program.
Jitted = nn.jit(Unit)
Rematerialized = nn.remat(Jitted)
JittedRemat = nn.jit(nn.remat(Unit))
JittedDense = nn.jit(nn.Dense)


class Decorated(Unit):
    """nn.jit on the method."""

    @nn.jit
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(D, name="dense", dot_general_cls=fp8(self.recipe))(x)


class Compact(nn.Module):
    """Equal blocks; `recipes`, one for each of them, are the edit by hand."""

    block: type
    recipes: tuple = (None, None, None)

    @nn.compact
    def __call__(self, x):
        for i, recipe in enumerate(self.recipes):
            x = self.block(recipe, name=f"stack_{i}")(x)
        return x


class Scanned(nn.Module):
    recipes: tuple = (None, None, None)

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(ScanBody, **STACKED, length=2)
        return scan(self.recipes, name="blocks")(x, None)[0]


class ScanBody(nn.Module):
    recipes: tuple

    @nn.compact
    def __call__(self, x, _):
        for i, recipe in enumerate(self.recipes):
            x = x + JittedDense(D, name=f"stack_{i}", dot_general_cls=fp8(recipe))(x)
        return x, None


def sequential(recipes=(None, None, None)):
    """Blocks in a field, which Flax binds before any method runs."""
    return nn.Sequential([Jitted(recipe) for recipe in recipes])


STACK_RULES = [
    ("(.*/)?(stack|layers)_0(/dense)?", A),
    ("(.*/)?(stack|layers)_1(/dense)?", B),
]
STACKS = {
    "compact": functools.partial(Compact, Jitted),
    "remat of jit": functools.partial(Compact, Rematerialized),
    "jit of remat": functools.partial(Compact, JittedRemat),
    "method": functools.partial(Compact, Decorated),
    "fields": sequential,
    "scan": Scanned,
}


@each_row("stack", STACKS)
def test_blocks_in_nn_jit(stack):
    """The first block runs one recipe, the second another one, the last none."""
    plain = stack()
    hand = stack(recipes=(A, B, None))
    # the program of all blocks that a cache could find
    plain.init(KEY, x())
    compare_training(quantize(plain, STACK_RULES), hand, x(), steps=1)


def test_blocks_in_nn_jit_outside_of_jit():
    """Compiled block by block, and found in the caches in the second round, by an equal
    model; other rules are not.
    """
    hand = Compact(Jitted, (A, B, None))
    variables = hand.init(KEY, x())
    wanted = [hand.apply(variables, x(seed)) for seed in (1, 2)]
    for _ in range(2):
        quantized = quantize(Compact(Jitted), STACK_RULES)
        assert_same([quantized.apply(variables, x(seed)) for seed in (1, 2)], wanted)
    hand = Compact(Jitted, (None, None, None))
    params = {"params": variables["params"]}
    other = quantize(Compact(Jitted), [(".*", None)])
    assert_same(other.apply(params, x()), hand.apply(params, x()))


def test_path_that_nn_jit_cannot_see_is_refused():
    """Blocks in a field of a module in nn.remat have the path of that module in their
    flags.
    """
    hidden = nn.remat(nn.Sequential)([Jitted(), Jitted()])
    hidden.init(KEY, x())
    with pytest.raises(
        ValueError,
        match=r"layers_\d is in nn.jit, inside of another transform.*take nn.jit away",
    ):
        quantize(hidden, STACK_RULES).init(KEY, x())
