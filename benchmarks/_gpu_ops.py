"""The FP8 product beside its peers."""

import functools

import _gpu_torch
import jax
import jax.numpy as jnp
from _gpu_answers import PRODUCT_LIMITS, expect_product
from _gpu_inputs import E4M3, normal
from _gpu_timing import attempt, measure, program

from jaxfp8 import ops


def gemm(options):
    """Time the FP8 product of random codes, with fast and with precise accumulation."""
    m = n = k = options.size(8192)
    scale = jnp.float32(2.0**-5)
    pairs = [
        tuple(
            ops.quantize(normal(10 * i + j, (n, k)), 1 / scale, E4M3)[0] for j in (1, 2)
        )
        for i in range(3)
    ]
    wide = [(normal(10 * i, (m, k)), normal(10 * i + 1, (k, n))) for i in range(3)]
    candidates, errors = {}, {}

    def check(name, result, accumulation):
        expect_product(
            name, result, *pairs[0], PRODUCT_LIMITS[accumulation], scale, scale
        )

    def ours(accumulation):
        def step(a, b):
            return ops.scaled_matmul(
                a, b, scale, scale, precise=accumulation == "precise"
            )

        check("scaled_matmul", jax.jit(step)(*pairs[0]), accumulation)
        return program(step, pairs)

    def torchs(accumulation):
        candidate, first = _gpu_torch.scaled_mm(
            pairs, scale, scale, accumulation == "fast"
        )
        check("torch._scaled_mm", jnp.asarray(first), accumulation)
        return candidate

    for name in PRODUCT_LIMITS:
        attempt(candidates, errors, f"jaxfp8 {name}", functools.partial(ours, name))
        if _gpu_torch.is_there():
            attempt(
                candidates,
                errors,
                f"torch._scaled_mm {name}",
                functools.partial(torchs, name),
            )
    for suffix, compiler in options.compilers().items():
        attempt(
            candidates,
            errors,
            f"bf16{suffix}",
            lambda c=compiler: program(jnp.matmul, wide, c),
        )
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["tflops"] = 2 * m * n * k / row["us"] * 1e-6
    return rows, errors
