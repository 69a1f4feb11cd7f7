"""Mutants of a step of delayed scaling: the comparison with the oracle must fail for
each number that it compares.

Flaws of codes are those of `oracle/test_vectors.py`.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from parametrize import each_row
from recipes.delayed_cases import compare_run, scripted_run

import jaxfp8
from jaxfp8 import ops
from jaxfp8.recipes import ByQuantizer

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def without_a_scale(product):
    """One of the three products, 0 fprop, 1 dgrad, 2 wgrad, has no `a_scale_inv`."""

    def install(monkeypatch):
        original, count = ops.scaled_matmul, itertools.count()

        def mutant(a, b, a_scale_inv, b_scale_inv, **options):
            if next(count) == product:
                a_scale_inv = jnp.ones_like(a_scale_inv)
            return original(a, b, a_scale_inv, b_scale_inv, **options)

        monkeypatch.setattr(ops, "scaled_matmul", mutant)

    return install


def write_mutant(before=lambda history: history, after=lambda history, scale, amax: ()):
    """Change the histories that a step moves by one slot, or what it writes:
    `after(history, scale, amax) -> history, scale`.
    """

    def install(monkeypatch):
        def mutant(products, recorded, original=ops.write_histories):
            changed = [(before(history), scale) for history, scale in products[0]]
            (written,) = original([changed], recorded)
            return [
                [
                    after(*pair, amax) or pair
                    for pair, (amax, _) in zip(written, recorded[0], strict=True)
                ]
            ]

        monkeypatch.setattr(ops, "write_histories", mutant)

    return install


def e4m3_for_everything(original):
    def quantizers(self):
        forward, _, _, *others = original(self)
        return ByQuantizer(forward, forward, forward, *others)

    return quantizers


def bad_values_saturate(monkeypatch):
    for op in (ops.Quantize, ops.QuantizeTranspose):

        def mutant(self, x, scale, *amaxes, original=op.__call__):
            return original(self, jnp.nan_to_num(x), scale, *amaxes)

        monkeypatch.setattr(op, "__call__", mutant)


MUTANTS = {
    "fprop without a scale": without_a_scale(0),
    "dgrad without a scale": without_a_scale(1),
    "wgrad without a scale": without_a_scale(2),
    "e4m3 for everything": attribute(
        jaxfp8.DelayedScaling, "quantizers", e4m3_for_everything
    ),
    "scale not stored": write_mutant(
        after=lambda history, scale, amax: (history, jnp.ones_like(scale))
    ),
    "the roll forgotten": write_mutant(lambda history: jnp.roll(history, 1)),
    "inf recorded in the history": write_mutant(
        after=lambda history, scale, amax: (history.at[0].set(amax[0]), scale)
    ),
    "bad values saturate": bad_values_saturate,
}


@each_row("install", MUTANTS)
def test_mutant_is_caught(install, monkeypatch):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        compare_run(jaxfp8.DelayedScaling(amax_history_len=4), scripted_run(np.float32))
