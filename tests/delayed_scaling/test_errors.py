"""Recipes as values, and what is refused: options, arguments, derivatives that would be wrong."""

import dataclasses

import numpy as np
import pytest

import jaxfp8

from .cases import MATMUL, newest_two


def test_recipes_compare_and_hash_by_value():
    make = lambda **kw: jaxfp8.DelayedScaling(**{"amax_history_len": 16, **kw})  # noqa: E731
    assert make() == make() and hash(make()) == hash(make())
    others = [
        make(margin=1),
        make(amax_history_len=17),
        make(amax_compute_algo="most_recent"),
        make(amax_compute_algo=newest_two),
        make(fp8_format=jaxfp8.E4M3),
        make(first_step="current"),
        make(pipeline_axes=("pp",)),
    ]
    assert len({make(), *others}) == 1 + len(others)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().margin = 3
    assert jaxfp8.DelayedScaling() == jaxfp8.DelayedScaling(
        margin=0,
        amax_history_len=1024,
        amax_compute_algo="max",
        fp8_format=jaxfp8.HYBRID,
        first_step="unit",
        reduce_amax=True,
    )
    assert dataclasses.replace(make(), margin=1).margin == 1


BAD_OPTIONS = {
    "amax_compute_algo": ["mean", None, 3],
    "first_step": ["none", None],
    "amax_history_len": [0, -1, 2.5, "8"],
    "fp8_format": ["HYBRID", None],
    "margin": ["1", None, np.nan, np.inf],
    "pipeline_axes": ["pp"],
    "reduce_amax": [False, None, "yes"],
}


@pytest.mark.parametrize("name, value", [(n, v) for n, vs in BAD_OPTIONS.items() for v in vs])
def test_unknown_options_raise_and_are_named(name, value):
    error = ValueError if name in ("amax_compute_algo", "first_step", "reduce_amax") else (TypeError, ValueError)
    with pytest.raises(error, match=name):
        jaxfp8.DelayedScaling(**{name: value})


GOOD_X, GOOD_KERNEL = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)


def run(x=GOOD_X, kernel=GOOD_KERNEL, dims=MATMUL, **options):
    recipe = jaxfp8.DelayedScaling(amax_history_len=2)
    return jaxfp8.dot_general(x, kernel, dims, **{"recipe": recipe, "state": jaxfp8.init_state(recipe), **options})


BAD_ARGUMENTS = {
    "x f64": ({"x": np.ones((2, 3), np.float64)}, TypeError, r"\bx\b"),
    "k differs": ({"kernel": np.ones((5, 4), np.float32)}, ValueError, "contracting"),
    "batch differs": (
        {
            "x": np.ones((2, 2, 3), np.float32),
            "kernel": np.ones((3, 3, 4), np.float32),
            "dims": (((2,), (1,)), ((0,), (0,))),
        },
        ValueError,
        "batch",
    ),
    "no such dimension": ({"dims": (((2,), (0,)), ((), ()))}, ValueError, "dimension"),
    "no state": ({"state": None}, ValueError, "state"),
    "output dtype": ({"preferred_element_type": np.int32}, TypeError, "preferred_element_type"),
}


@pytest.mark.parametrize("arguments, error, match", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_of_dot_general(arguments, error, match):
    assert np.asarray(run()).tolist() == [[3.0] * 4] * 2, "the defaults are good"
    with pytest.raises(error, match=match):
        run(**arguments)
