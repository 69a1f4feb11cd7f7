"""Step by step against the oracle: scales and histories bitwise, the three products in
their bound.

The cotangent of the state is the next state, so one `jax.vjp` is one training step; no
test adds anything to it.
"""

import itertools

import numpy as np
import oracle
import pytest
from parametrize import each_row

import jaxfp8

from .delayed_cases import (
    DTYPES,
    FORMATS,
    compare_run,
    newest_two,
    scripted_run,
)


@DTYPES
@pytest.mark.parametrize("name", ["ffi", "reference"])
def test_scripted_steps(dtype, name):
    with jaxfp8.ops.implementation(name):
        compare_run(jaxfp8.DelayedScaling(amax_history_len=4), scripted_run(dtype))


OPTIONS = {
    "margin 3": {"margin": 3},
    "margin -2": {"margin": -2},
    "most_recent": {"amax_compute_algo": "most_recent"},
    "callable": {"amax_compute_algo": newest_two},
    "first_step current": {"first_step": "current"},
    "current, most_recent, margin": {
        "first_step": "current",
        "amax_compute_algo": "most_recent",
        "margin": 1,
    },
}


@each_row("options", OPTIONS)
def test_options(options):
    """Without subnormal amaxes, which XLA reads as 0 in a function of a user's."""
    compare_run(
        jaxfp8.DelayedScaling(amax_history_len=4, **options),
        itertools.islice(scripted_run(np.float32), 16),
        oracle.Options(**options),
    )


@pytest.mark.parametrize("length", [1, 2, 1024])
def test_history_lengths(length):
    compare_run(
        jaxfp8.DelayedScaling(amax_history_len=length), scripted_run(oracle.BF16)
    )


@each_row("fmt, forward, backward", FORMATS)
def test_formats(fmt, forward, backward):
    recipe = jaxfp8.DelayedScaling(amax_history_len=4, fp8_format=fmt)
    compare_run(recipe, scripted_run(np.float32), forward=forward, backward=backward)
