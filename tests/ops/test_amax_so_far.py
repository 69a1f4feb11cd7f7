"""quantize and quantize_transpose raise the amax they are given, one for all uses of a quantizer in a step; or none."""

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops
from jaxfp8.ops._quantize import quantize_with
from jaxfp8.ops._quantize_transpose import quantize_transpose_with

from . import cases

E4M3 = cases.dtype_of(oracle.E4M3)


@pytest.fixture(params=["quantize", "quantize_transpose"])
def name(request):
    return request.param


@pytest.fixture
def quantize(name):
    return getattr(ops, name)


@pytest.mark.parametrize("fmt", cases.FORMATS, ids=lambda fmt: fmt.dtype.name)
def test_goes_on_from_it(implementation, name, quantize, fmt):
    """The codes do not know of it. Empty arrays leave it as it is."""
    x = cases.random_values((21, 41), oracle.BF16, 23, spread=1)
    *expected, own = getattr(oracle, name)(x, np.float32(2), fmt)
    for amax in cases.AMAXES_SO_FAR:
        for shape_of in (amax, amax.reshape(1)):
            *codes, top = quantize(x, np.float32(2), cases.dtype_of(fmt), amax=shape_of)
            cases.assert_bitwise(top, np.maximum(amax, own), f"amax so far {amax}")
            for i, (got, want) in enumerate(zip(codes, expected, strict=True)):
                cases.assert_bitwise(got, want, f"amax so far {amax}: result {i}")
        *_, top = quantize(x[:0], np.float32(2), cases.dtype_of(fmt), amax=amax)
        cases.assert_bitwise(top, amax, f"empty, amax so far {amax}")


def test_of_each_member(implementation, quantize):
    x, amaxes = cases.random_values((3, 4, 6), np.float32, 29, spread=1), np.float32([0, 1e30, 2.0**-140])
    *_, tops = jax.vmap(lambda x, a: quantize(x, np.float32(2), E4M3, amax=a))(x, amaxes)
    cases.assert_bitwise(tops, np.maximum(amaxes, [oracle.amax(member) for member in x]), "own amaxes")
    *_, tops = jax.vmap(lambda a: quantize(x[0], np.float32(2), E4M3, amax=a))(amaxes)
    cases.assert_bitwise(tops, np.maximum(amaxes, oracle.amax(x[0])), "own amaxes, one x")


def test_the_one_that_is_given_stays(implementation, quantize):
    """It is raised in a copy where the program needs it otherwise."""
    x, amax = np.float32([[3, -4]]), np.float32([1])
    *_, raised, same = jax.jit(lambda x, a: (*quantize(x, np.float32(1), E4M3, amax=a), a))(x, amax)
    cases.assert_bitwise(raised, np.float32(4), "raised")
    cases.assert_bitwise(same, amax, "the operand")


def codes_alone(name, x, scale):
    """The codes, in the layouts that the op has, by its form without an amax."""
    with_options, options = quantize_with, {"amax": None, "with_amax": False}
    if name == "quantize_transpose":
        with_options, options = quantize_transpose_with, options | {"rows": 1, "cols": 1, "column_sums": False}
    *codes, top = with_options(x, scale, E4M3, **options)
    assert top is None
    return codes


def test_codes_alone(implementation, name):
    x, scales = cases.random_values((3, 21, 41), oracle.BF16, 23, spread=1), np.float32([2, 0.5, 16])
    members = jax.vmap(lambda x, scale: codes_alone(name, x, scale))(x, scales)
    for i, scale in enumerate(scales):
        *expected, _ = getattr(oracle, name)(x[i], scale, oracle.E4M3)
        for got, member, want in zip(codes_alone(name, x[i], scale), members, expected, strict=True):
            cases.assert_bitwise(got, want, f"scale {scale}")
            cases.assert_bitwise(member[i], want, f"member {i}")
