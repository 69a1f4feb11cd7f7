"""Products: one scale a tensor, scales of blocks, groups of rows."""

import functools

import jax.numpy as jnp
import numpy as np
from _gpu_answers import PRODUCT_LIMITS, expect_product, stretch
from _gpu_inputs import BF16, E4M3, normal

from jaxfp8 import ops

from ._memory import scale_kind
from ._work import F32, SCALE, Work, codes

EXPERTS = 8
SCALE_INV = np.float32(1 / SCALE)


def scaled_matmul(m, n, accumulation):
    precise = accumulation == "precise"

    def step(a, b):
        return ops.scaled_matmul(a, b, SCALE_INV, SCALE_INV, precise=precise)

    def arguments(seed):
        return codes(2 * seed, (m, n)), codes(2 * seed + 1, (n, n))

    def check(result, a, b):
        expect_product(
            "scaled_matmul",
            result,
            a,
            b,
            PRODUCT_LIMITS[accumulation],
            SCALE_INV,
            SCALE_INV,
        )

    return Work(step, arguments, check, operations=2 * m * n * n)


def block_scaled_matmul(m, n, a_block, b_block):
    def arguments(seed):
        def operand(i, shape, block):
            return ops.quantize_blocks(
                normal(2 * seed + i, shape), E4M3, block=block, **scale_kind(block)
            )

        return *operand(0, (m, n), a_block), *operand(1, (n, n), b_block)

    def step(a, a_scale_inv, b, b_scale_inv):
        return ops.block_scaled_matmul(
            a, b, a_scale_inv, b_scale_inv, a_block=a_block, b_block=b_block
        )

    def check(result, a, a_scale_inv, b, b_scale_inv):
        scales = (
            stretch(a_scale_inv, a_block, a.shape),
            stretch(b_scale_inv, b_block, b.shape),
        )
        expect_product(
            "block_scaled_matmul", result, a, b, PRODUCT_LIMITS["fast"], *scales
        )

    return Work(step, arguments, check, operations=2 * m * n * n)


def _ragged_shapes(m, n, ragged):
    return ((m, n), (EXPERTS, n, n)) if ragged == "rows" else ((n, m), (n, m))


def _expect_ragged_product(m, ragged, limit, result, a, b, scales_of_group):
    for i in range(EXPERTS):
        group = slice(i * m // EXPERTS, (i + 1) * m // EXPERTS)
        product = (
            (result[group], a[group], b[i])
            if ragged == "rows"
            else (result[i], a[:, group], b[:, group])
        )
        expect_product(
            f"ragged_matmul, group {i}", *product, limit, *scales_of_group(i, group)
        )


def ragged_matmul(m, n, ragged, accumulation, out_dtype):
    """Eight experts. A copy of the bytes is the other limit: matrices of all experts
    are read, or in a contraction written.
    """
    sizes = jnp.full((EXPERTS,), m // EXPERTS, jnp.int32)

    def step(a, b):
        return ops.ragged_matmul(
            a,
            b,
            SCALE_INV,
            SCALE_INV,
            sizes,
            ragged=ragged,
            precise=accumulation == "precise",
            out_dtype=out_dtype,
        )

    def arguments(seed):
        shapes = _ragged_shapes(m, n, ragged)
        return tuple(codes(2 * seed + i, shape) for i, shape in enumerate(shapes))

    def check(result, a, b):
        limit = PRODUCT_LIMITS[accumulation]
        _expect_ragged_product(
            m, ragged, limit, result, a, b, lambda i, group: (SCALE_INV, SCALE_INV)
        )

    return Work(step, arguments, check, operations=2 * m * n * n, is_copied=True)


def ragged_blocks(m, n, ragged):
    is_rows = ragged == "rows"
    sizes = jnp.full((EXPERTS,), m // EXPERTS, jnp.int32)
    blocks = (1, 128), (128, 128) if is_rows else (1, 128)
    out_dtype = jnp.bfloat16 if is_rows else jnp.float32

    def arguments(seed):
        operands = zip(_ragged_shapes(m, n, ragged), blocks, strict=True)
        arrays = []
        for i, (shape, block) in enumerate(operands):
            x = normal(2 * seed + i, shape)
            arrays += ops.quantize_blocks(x, E4M3, block=block)
        return tuple(arrays)

    def step(a, a_scale_inv, b, b_scale_inv):
        return ops.ragged_matmul(
            a,
            b,
            a_scale_inv,
            b_scale_inv,
            sizes,
            ragged=ragged,
            out_dtype=out_dtype,
            a_block=blocks[0],
            b_block=blocks[1],
        )

    def check(result, a, a_scale_inv, b, b_scale_inv):
        a_scales = stretch(a_scale_inv, blocks[0], a.shape)

        def scales_of_group(i, group):
            if is_rows:
                return a_scales[group], stretch(b_scale_inv[i], blocks[1], b.shape[1:])
            b_scales = stretch(b_scale_inv, blocks[1], b.shape)
            return a_scales[:, group], b_scales[:, group]

        limit = PRODUCT_LIMITS["precise"]
        _expect_ragged_product(m, ragged, limit, result, a, b, scales_of_group)

    return Work(step, arguments, check, operations=2 * m * n * n, is_copied=True)


# What training runs: fprop is "rows", dgrad "rows precise", wgrad "contraction
# precise", in the dtype of the kernel or of `wgrad_dtype`.
_RAGGED = {
    "rows": ("rows", "fast", BF16),
    "rows precise": ("rows", "precise", BF16),
    "contraction": ("contraction", "fast", BF16),
    "contraction precise": ("contraction", "precise", BF16),
    "contraction precise to f32": ("contraction", "precise", F32),
}
_PAIRS = {
    "1x128 by 128x128": ((1, 128), (128, 128)),
    "row-wise": ((1, None), (1, None)),
}

KERNELS = {
    **{
        f"scaled_matmul {name}": functools.partial(scaled_matmul, accumulation=name)
        for name in PRODUCT_LIMITS
    },
    **{
        f"block_scaled_matmul {name}": functools.partial(
            block_scaled_matmul, a_block=a_block, b_block=b_block
        )
        for name, (a_block, b_block) in _PAIRS.items()
    },
    **{
        f"ragged_matmul {name}": functools.partial(
            ragged_matmul, ragged=ragged, accumulation=accumulation, out_dtype=dtype
        )
        for name, (ragged, accumulation, dtype) in _RAGGED.items()
    },
    **{
        f"ragged_matmul {name}, blocks": functools.partial(ragged_blocks, ragged=name)
        for name in ("rows", "contraction")
    },
}
