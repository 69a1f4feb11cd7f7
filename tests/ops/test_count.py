"""count_saturated_and_flushed: bitwise against the oracle."""

import jax
import numpy as np
import oracle
import pytest
from oracle import F32

from jaxfp8 import ops

from . import cases
from .conftest import EACH_DTYPE, EACH_FORMAT

IMPLEMENTATIONS = ("ffi", "reference", pytest.param("cuda", marks=pytest.mark.gpu))

E4M3 = cases.dtype_of(oracle.E4M3)
SCALES = F32([1, 3.7, 2.0**-20, 2.0**40, 2.0**-126, np.finfo(F32).max])
SUBNORMAL_SCALES = np.uint32([1, 0x400000, 0x7FFFFF]).view(F32)


def assert_counted(x, scale, fmt, what):
    found = ops.count_saturated_and_flushed(x, scale, cases.dtype_of(fmt))
    cases.assert_bitwise(found, oracle.counts(x, scale, fmt), what)


@EACH_FORMAT
@EACH_DTYPE
@pytest.mark.parametrize(
    "scales",
    [SCALES, SUBNORMAL_SCALES, cases.STRANGE_SCALES],
    ids=["scales", "subnormal", "strange"],
)
def test_every_value(implementation, dtype, fmt, scales):
    """All 16-bit values, or f32 corner cases and the neighbours of the rounding
    boundaries at that scale.
    """
    for i, scale in enumerate(scales):
        x = oracle.all_half_codes(dtype)
        if dtype.itemsize == 4:
            probes = (
                cases.probes_for(scales[i : i + 1], fmt)[0]
                if scales is SCALES
                else oracle.rounding_probes(fmt)
            )
            x = np.concatenate([oracle.f32_corner_cases(), probes])
        assert_counted(
            np.resize(x, (-(-x.size // 100), 100)),
            scale,
            fmt,
            f"{dtype} {fmt.name} {scale}",
        )


def test_more_than_f32_can_count(implementation):
    """Sums are of integers, here of 257 rows: a sum of ones in float32 would stop at
    2**24.
    """
    x = np.full((2**24 + 2**10,), 449, np.float16)
    found = jax.jit(lambda x: ops.count_saturated_and_flushed(x, F32(1), E4M3))(x)
    cases.assert_bitwise(found, F32([2**24 + 2**10, 0]), "all saturate")
