"""The arithmetic of programs for TPUs, run on the CPU of this machine: codes and amax
of the oracle, to the bit.

A TPU's own casts and flushes cannot be seen here. Inputs below 2**-126, which it reads
as zero, are left out.
"""

import jax
import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import F32
from parametrize import each_row

from jaxfp8 import numerics, ops
from jaxfp8.numerics import _tpu

TINY = F32(2.0**-126)


@each_row("fmt", oracle.FORMATS)
def test_codes_are_the_oracles(fmt):
    @jax.jit
    def encode(x, scale):
        with _tpu.devices("one"):
            return numerics.encode(x, scale, fmt.dtype)

    x = np.concatenate([oracle.f32_corner_cases(), oracle.rounding_probes(fmt)])
    x = x[~(np.abs(x) < TINY) | (x == 0)]
    for scale in F32([1, 3.7, 2.0**-100, 2.0**100, 2.0**126]):
        for values in (x, x.astype(ml_dtypes.bfloat16)):
            normal = values[~(np.abs(values.astype(F32)) < TINY) | (values == 0)]
            codes = np.asarray(encode(normal, scale.reshape(1)))
            expected, _ = oracle.quantize(normal, scale, fmt)
            assert np.array_equal(codes.view(np.uint8), expected.view(np.uint8)), (
                f"{values.dtype} * {scale}"
            )


@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("special", [1000, np.nan, -np.inf])
@pytest.mark.parametrize("row", [0, 127], ids=["first part", "last part"])
def test_the_amax_by_parts_is_the_oracles(row, special, dtype):
    x = np.random.default_rng(0).standard_normal((128, 40)).astype(dtype)
    x[row, 3] = special
    with ops.implementation("tpu"):
        assert np.asarray(jax.jit(ops.amax)(x)) == oracle.amax(x)
        assert np.asarray(jax.jit(jax.vmap(ops.amax))(x[None])) == oracle.amax(x)
