"""Negative controls: the comparisons of this folder fail where calibrating or freezing
is wrong on purpose.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from equality import assert_same_bits
from inference import models, test_calibrate, test_copies
from inference.models import X

import jaxfp8
from jaxfp8 import recipes
from jaxfp8.dot import _frozen
from jaxfp8.inference import _calibrate
from jaxfp8.recipes import _delayed, _read


def compare(change=lambda frozen: frozen):
    model, variables, _ = models.linen("Dense, bf16")
    assert_same_bits(
        model.apply(change(jaxfp8.freeze(model, variables, X)), X),
        models.run(model, variables),
        "y",
    )


@pytest.mark.parametrize("name", ["input_scale", "input_scale_inv", "kernel_scale_inv"])
def test_a_wrong_scale(name):
    def change(frozen):
        params = frozen["params"]
        of = dict(params["Fp8DotGeneral_0"])
        return frozen | {
            "params": params | {"Fp8DotGeneral_0": of | {name: 1.5 * of[name]}}
        }

    with pytest.raises(AssertionError, match="differ"):
        compare(change)


def test_the_scale_of_another_step(monkeypatch):
    """Stored scales are those of another step."""
    scales_of = recipes.scales_of

    def of_another_step(quantizers, state, **options):
        scales = scales_of(quantizers, state, **options)
        if options:  # a product, and not freeze
            return scales
        doubled = dataclasses.replace(scales.input, scale=2 * scales.input.scale)
        return scales._replace(input=doubled)

    monkeypatch.setattr(recipes, "scales_of", of_another_step)
    with pytest.raises(AssertionError, match="differ"):
        compare()


def test_codes_that_are_not_transposed(monkeypatch):
    quantized = _frozen._quantized

    def as_stored(kernel, *args, **options):
        q = quantized(kernel, *args, **options)
        return dataclasses.replace(q, data=q.data.mT.reshape(q.data.shape))

    monkeypatch.setattr(_frozen, "_quantized", as_stored)
    with pytest.raises(AssertionError, match="differ"):
        compare()


def test_the_kernel_in_its_own_dtype(monkeypatch):
    """Not in the layer's: codes of a float32 kernel where the layer computes in
    bfloat16.
    """
    _, variables, _ = models.linen("Dense, bf16")
    freeze_operands = _frozen.freeze_operands

    def of_float32(x_shape, kernel, *args, **options):
        return freeze_operands(x_shape, variables["params"]["kernel"], *args, **options)

    monkeypatch.setattr(_frozen, "freeze_operands", of_float32)
    with pytest.raises(AssertionError, match="differ"):
        compare()


def test_histories_by_sum(monkeypatch):
    """Without `max_grad` autodiff adds what the calls of a checkpointed layer return;
    and `update_state` says so.
    """
    test_calibrate.test_a_layer_called_twice()
    jax.clear_caches()
    monkeypatch.setattr(_calibrate, "max_grad", lambda tree: tree)
    with pytest.raises(
        (AssertionError, ValueError), match=r"differ|update_state: .*summed"
    ):
        test_calibrate.test_a_layer_called_twice()


def test_histories_that_do_not_move(monkeypatch):
    monkeypatch.setattr(_calibrate, "update_state", lambda old, new: old)
    with pytest.raises(AssertionError, match="differ"):
        test_calibrate.test_linen()


def of_training(monkeypatch):
    """A copy keeps the scale 1."""
    monkeypatch.setattr(_delayed, "_takes_own_amax", lambda *_: jnp.bool_(False))


def whatever_the_scale(monkeypatch):
    """A stored scale without a history gives way too."""
    monkeypatch.setattr(
        _delayed,
        "_takes_own_amax",
        lambda quantizer, scale: _delayed.is_empty(scale.history),
    )


def whatever_the_history(monkeypatch):
    """An amax of 448, whose scale is 1, gives way too."""
    monkeypatch.setattr(
        _delayed,
        "_takes_own_amax",
        lambda quantizer, scale: scale.scale.reshape(()) == 1,
    )


def in_training(monkeypatch):
    """The first step of training takes the scale of the tensor too."""
    scales_of = recipes.scales_of
    monkeypatch.setattr(_read, "_may_ask", lambda *_: True)
    monkeypatch.setattr(
        recipes, "scales_of", lambda *args, has_backward: scales_of(*args, False)
    )


COPIES = {
    of_training: lambda: test_copies.test_functions(
        "dot_general", False, "small kernel"
    ),
    whatever_the_scale: lambda: (
        test_copies.test_a_touched_state_gives_the_bits_of_training([0] * 4, 0.25)
    ),
    whatever_the_history: lambda: (
        test_copies.test_a_touched_state_gives_the_bits_of_training(
            [0, 0, 0, 448.0], 2.0
        )
    ),
    in_training: lambda: test_copies.test_functions(
        "dot_general", False, "small kernel"
    ),
}


@pytest.mark.parametrize("mutant", COPIES)
def test_a_mutant_of_copies_is_caught(mutant, monkeypatch):
    COPIES[mutant]()
    jax.clear_caches()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        COPIES[mutant]()
    jax.clear_caches()
