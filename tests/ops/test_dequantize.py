"""dequantize: all 256 codes of both formats, bitwise against the oracle, over scales
and output dtypes.
"""

import jax
import numpy as np
import oracle

from jaxfp8 import ops

from . import cases
from .conftest import EACH_DTYPE, EACH_FORMAT


def check_rows(codes, scales, dtype, what):
    run = jax.vmap(lambda scale_inv: ops.dequantize(codes, scale_inv, dtype))
    out = np.asarray(run(scales))
    for i, scale_inv in enumerate(scales):
        cases.assert_bitwise(
            out[i], oracle.dequantize(codes, scale_inv, dtype), f"{what} {scale_inv!r}"
        )


@EACH_FORMAT
@EACH_DTYPE
def test_every_code_at_every_scale(implementation, dtype, fmt):
    """Subnormal results and scales too: XLA:CPU runs with flush-to-zero."""
    rng = np.random.default_rng(23)
    subnormal = np.uint32([1, 0x1000, 0x7FFFFF, 0x400000]).view(np.float32)
    small = np.float32(2.0 ** rng.uniform(-142, -110, 60))
    of_half_dtypes = np.float32([2.0**-24, 6e-9])
    for scales in (
        cases.SCALES,
        cases.STRANGE_SCALES,
        subnormal,
        small,
        of_half_dtypes,
    ):
        check_rows(oracle.all_codes(fmt), scales, dtype, "scale_inv")


@EACH_FORMAT
def test_shapes(implementation, fmt):
    for seed, shape in enumerate(cases.SHAPES + cases.EMPTY_SHAPES):
        dtype = cases.INPUT_DTYPES[seed % 3]
        codes = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        codes = np.asarray(codes).view(fmt.dtype)
        scale_inv = np.float32([0.37]).reshape(((), (1,))[seed % 2])
        got = ops.dequantize(codes, scale_inv, dtype)
        cases.assert_bitwise(
            got,
            oracle.dequantize(codes, np.float32(0.37), dtype),
            f"dequantize of {shape}",
        )
