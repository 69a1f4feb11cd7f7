"""Mutants of blocks with scales of their own must fail the comparisons of their ops'
tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops import (
    cases,
    test_block_scaled_matmul as of_products,
    test_quantize_blocks as of_quantize,
    test_transpose_blocks as of_transpose,
)
from oracle import E4M3
from parametrize import each_row

from jaxfp8 import ops
from jaxfp8.numerics import _scaling
from jaxfp8.ops import _block_scaled_matmul, _blocks, _quantize_blocks

from . import attribute

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_stays_traced")]


def quantized():
    x = cases.random_values((6, 80), np.float32, 2)
    x[1], x[2, 3], x[3, :40] = 0, np.nan, 1e-40
    for options in of_quantize.KINDS.values():
        of_quantize.check(x, E4M3, (1, 32), **options)


def transposed():
    codes = np.random.default_rng(0).integers(0, 256, (6, 8), np.uint8)
    scales = of_transpose.random_scales((6, 2), of_transpose.MX, 1, 3)
    of_transpose.check(codes.view(E4M3.dtype), scales, E4M3, 4)


def multiplied():
    for pair in of_products.PAIRS[1:4]:
        of_products.test_shapes("cpu", (16, 48, 256), pair)


def with_extreme_scales():
    of_products.test_extreme_powers_of_two("cpu", 1, (-127, 127))


def other_rounding(original):
    return lambda amax, dtype, rounding: original(
        amax, dtype, "floor" if rounding == "ceil" else "ceil"
    )


def nearest(original):
    return lambda amax, dtype, _: original(amax * jnp.float32(2**0.5), dtype, "floor")


def the_scale_itself(original):
    def mutant(*args):
        scale, scale_inv = original(*args)
        return scale, scale.astype(scale_inv.dtype)

    return mutant


def loses_nan(x, axis):
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0 * x), axis=axis)


def flushes_subnormals(original):
    def mutant(data, shift):
        codes = original(data, shift)
        return jnp.where(codes & 0x7F < 8, codes & 0x80, codes)

    return mutant


def shifts_blocks(original):
    return lambda scales, block, m, n: jnp.roll(
        original(scales, block, m, n), 1, axis=-1 if n > 1 else -2
    )


def multiplies_by_the_scale(original):
    def mutant(codes, scales, *rest):
        inverse = (1 / scales.astype(jnp.float32)).astype(scales.dtype)
        return original(codes, inverse, *rest)

    return mutant


def scales_in_bfloat16(original):
    """What a product in bf16 of f32 scales would be."""
    return lambda self, dtype: original(self, dtype).astype(jnp.bfloat16).astype(dtype)


def subnormal_scales_as_floats(scales, dtype):
    return [scales.astype(jnp.float32).astype(dtype)]


MUTANTS = {
    "floor for ceil": (quantized, attribute(_blocks, "e8m0_scales", other_rounding)),
    "rounded to nearest": (quantized, attribute(_blocks, "e8m0_scales", nearest)),
    "blocks from one": (
        quantized,
        attribute(
            _blocks,
            "cut",
            lambda original: lambda x, block: original(jnp.roll(x, 1, -1), block),
        ),
    ),
    "the E8M0 scale itself": (
        quantized,
        attribute(_blocks, "e8m0_scales", the_scale_itself),
    ),
    "the f32 scale itself": (
        quantized,
        attribute(_blocks, "f32_scales", the_scale_itself),
    ),
    "NaN is lost": (quantized, attribute(_scaling, "abs_max", lambda _: loses_nan)),
    "the smallest scale flushed": (
        quantized,
        attribute(
            _blocks,
            "e8m0",
            lambda original: lambda e, nan: original(jnp.maximum(e, -126), nan),
        ),
    ),
    "subnormal codes flushed": (
        transposed,
        attribute(_quantize_blocks, "_shift_down", flushes_subnormals),
    ),
    "the first scale": (
        transposed,
        attribute(
            jnp,
            "max",
            lambda _: lambda x, axis, initial: x[..., :1, :, :].min(axis=axis),
        ),
    ),
    "blocks shifted": (multiplied, attribute(_blocks, "spread", shifts_blocks)),
    "times the scale": (
        multiplied,
        attribute(_block_scaled_matmul, "_Side", multiplies_by_the_scale),
    ),
    "scales in bfloat16": (
        multiplied,
        attribute(_block_scaled_matmul._Side, "widened", scales_in_bfloat16),
    ),
    "subnormal scales as floats": (
        with_extreme_scales,
        attribute(_blocks, "e8m0_factors", lambda _: subnormal_scales_as_floats),
    ),
}


@each_row("compare, install", MUTANTS)
def test_mutant_is_caught(compare, install, monkeypatch):
    with ops.implementation("reference"):
        compare()
        jax.clear_caches()
        install(monkeypatch)
        with pytest.raises(AssertionError, match="scale_inv|codes|out of bound|differ"):
            compare()
