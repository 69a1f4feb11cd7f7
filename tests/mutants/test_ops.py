"""Every mutant of a step must make the comparison of delayed scaling with the oracle
fail; the package as it is must not.

A mutant that survives here means that a check elsewhere proves nothing. Mutants replace
a function of the package by one with a flaw that peers have had. Flaws of codes are
those of `oracle/test_vectors.py`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from parametrize import each_row
from recipes.delayed_cases import compare_run, scripted_run

import jaxfp8
from jaxfp8 import ops
from jaxfp8.numerics import _scaling
from jaxfp8.recipes import ByQuantizer, _read

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")
HISTORY = 4


def compare_steps(recipe=None, options=None) -> None:
    """A run with every event against the oracle: raises AssertionError at the first
    difference.
    """
    recipe = recipe or jaxfp8.DelayedScaling(amax_history_len=HISTORY)
    compare_run(recipe, scripted_run(np.float32), options)


# -------------------------------------------------------------------- mutants of a step


def matmul_mutant(change):
    """scaled_matmul with its arguments changed:
    `change(index of the product, a_scale_inv, b_scale_inv)`.
    """

    def install(monkeypatch):
        original, count = ops.scaled_matmul, [0]

        def mutant(a, b, a_scale_inv, b_scale_inv, **options):
            scales = change(count[0], a_scale_inv, b_scale_inv)
            count[0] += 1
            return original(a, b, *scales, **options)

        monkeypatch.setattr(ops, "scaled_matmul", mutant)

    return install


def only(product, change):
    """Applies `change` to one of the three products: 0 fprop, 1 dgrad, 2 wgrad."""
    return matmul_mutant(lambda i, a, b: change(a, b) if i == product else (a, b))


def read_mutant(change):
    """Change what is read of states: `change(scale, state) -> scale`."""

    def install(monkeypatch):
        def mutant(quantizers, states, original=_read.scales_from):
            return list(map(change, original(quantizers, states), states))

        monkeypatch.setattr(_read, "scales_from", mutant)

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


def quantizers_mutant(change):
    """Other quantizers: `change(forward, backward) -> input, kernel, output_grad`."""

    def mutant(original):
        def quantizers(self):
            forward, _, backward, *others = original(self)
            return ByQuantizer(*change(forward, backward), *others)

        return quantizers

    return attribute(jaxfp8.DelayedScaling, "quantizers", mutant)


# Both quantizing ops, as quantizers call them.
QUANTIZE = (ops.Quantize, ops.QuantizeTranspose)


def op_mutant(change):
    """Both quantizing ops with changed arguments: `change(x, scale) -> (x, scale)`."""

    def install(monkeypatch):
        for op in QUANTIZE:

            def mutant(self, x, scale, *amaxes, original=op.__call__):
                return original(self, *change(x, scale), *amaxes)

            monkeypatch.setattr(op, "__call__", mutant)

    return install


def amax_after_scaling(monkeypatch):
    for op in QUANTIZE:

        def mutant(self, x, scale, *amaxes, original=op.__call__):
            results = list(original(self, x, scale, *amaxes))
            at = 1 + self.transpose
            results[at] *= jnp.reshape(scale, jnp.shape(results[at]))
            return results

        monkeypatch.setattr(op, "__call__", mutant)


def unclamped_scale(monkeypatch):
    def mutant(histories, stored, original=ops.delayed_scales, **options):
        scales = []
        for found, history, old, top in zip(
            original(histories, stored, **options),
            histories,
            stored,
            options["fp8_max"],
            strict=True,
        ):
            amax = _scaling.abs_max(_scaling.clean(history)).reshape(1)
            scale = jnp.where(amax > 0, jnp.float32(top) / amax, 1 / old)
            scales.append(found._replace(scale=scale, scale_inv=1 / scale))
        return scales

    monkeypatch.setattr(ops, "delayed_scales", mutant)


def ones(*scales):
    return tuple(jnp.ones_like(scale) for scale in scales)


STEP_MUTANTS = {
    "fprop without a_scale_inv": only(0, lambda a, b: (*ones(a), b)),
    "fprop without b_scale_inv": only(0, lambda a, b: (a, *ones(b))),
    "dgrad without the scale of grad": only(1, lambda a, b: (*ones(a), b)),
    "dgrad without the scale of kernel": only(1, lambda a, b: (a, *ones(b))),
    "wgrad without one scale": only(2, lambda a, b: (*ones(a), b)),
    "wgrad without the other scale": only(2, lambda a, b: (a, *ones(b))),
    "scales rounded to bf16": matmul_mutant(
        lambda i, *scales: tuple(
            s.astype(jnp.bfloat16).astype(jnp.float32) for s in scales
        )
    ),
    "scale where scale_inv belongs": matmul_mutant(lambda i, a, b: (1 / a, b)),
    "e4m3 and e5m2 swapped": quantizers_mutant(lambda f, b: (b, b, f)),
    "e4m3 for everything": quantizers_mutant(lambda f, b: (f, f, f)),
    "stale scale_inv": read_mutant(
        lambda scale, state: dataclasses.replace(scale, scale_inv=state.scale)
    ),
    "scale not stored": write_mutant(
        after=lambda history, scale, amax: (history, jnp.ones_like(scale))
    ),
    "scale stored instead of scale_inv": write_mutant(
        after=lambda history, scale, amax: (history, 1 / scale)
    ),
    "the roll forgotten": write_mutant(lambda history: jnp.roll(history, 1)),
    "rolled the other way": write_mutant(lambda history: jnp.roll(history, 2)),
    "newest in the last slot": write_mutant(
        after=lambda history, scale, amax: (jnp.roll(history, -1), scale)
    ),
    "inf recorded in the history": write_mutant(
        after=lambda history, scale, amax: (history.at[0].set(amax[0]), scale)
    ),
    "the amax of a step lost": write_mutant(
        after=lambda history, scale, amax: (history.at[0].set(0), scale)
    ),
    "amax of this step in this step's scale": op_mutant(
        lambda x, scale: (
            x,
            jnp.reshape(
                jnp.where(_scaling.abs_max(x) > 0, 448 / _scaling.abs_max(x), 1),
                scale.shape,
            ),
        )
    ),
    "amax after scaling": amax_after_scaling,
    "scale rounded to bf16 before quantizing": op_mutant(
        lambda x, scale: (x, scale.astype(jnp.bfloat16).astype(jnp.float32))
    ),
    "bad values saturate": op_mutant(lambda x, scale: (jnp.nan_to_num(x), scale)),
    "no clamp of the scale": unclamped_scale,
}


@each_row("install", STEP_MUTANTS)
def test_mutant_of_a_step_is_caught(install, monkeypatch):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        compare_steps()


RECIPE_MUTANTS = {
    "sum for max": (
        {"amax_compute_algo": lambda history: history.sum()},
        oracle.Options(),
    ),
    "mean for max": (
        {"amax_compute_algo": lambda history: history.mean()},
        oracle.Options(),
    ),
    "most_recent for max": ({"amax_compute_algo": "most_recent"}, oracle.Options()),
    "max for most_recent": ({}, oracle.Options(amax_compute_algo="most_recent")),
    "oldest for most_recent": (
        {"amax_compute_algo": lambda history: history[1]},
        oracle.Options(amax_compute_algo="most_recent"),
    ),
    "margin ignored": ({}, oracle.Options(margin=1)),
    "margin of the wrong sign": ({"margin": -1}, oracle.Options(margin=1)),
    "first step at scale 1": ({}, oracle.Options(first_step="current")),
    "a history shorter by one": (
        {"amax_compute_algo": lambda history: history[:-1].max()},
        oracle.Options(),
    ),
}


@each_row("keywords, options", RECIPE_MUTANTS)
def test_mutant_of_the_recipe_is_caught(keywords, options):
    """The package runs another recipe than the oracle: no option may pass for
    another.
    """
    with pytest.raises(AssertionError):
        compare_steps(
            jaxfp8.DelayedScaling(amax_history_len=HISTORY, **keywords), options
        )
