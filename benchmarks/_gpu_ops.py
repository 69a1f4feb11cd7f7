"""Single operations beside their peers: the FP8 product, and quantization."""

import functools

import _gpu_torch
import _xla_peers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _gpu_answers import PRODUCT_LIMITS, expect_product
from _gpu_inputs import BF16, E4M3, normal
from _gpu_timing import attempt, measure, program
from jax import lax

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


def quantize(options, op="quantize", dtype=BF16):
    """Time an op that is bound by memory, beside a copy and beside XLA's programs of
    the same in jnp.
    """
    n = options.size(8192)
    scale = jnp.float32(448 / 6.3)
    arrays = [(normal(i, (n, n), dtype), scale) for i in range(4)]

    def step(x, scale):
        return getattr(ops, op)(x, scale, E4M3)

    first = jax.jit(step)(*arrays[0])
    corner = np.asarray(arrays[0][0][: min(n, 256)]).astype(np.float32) * np.float32(
        scale
    )
    with ops.implementation("reference"):
        reference = jax.jit(lambda x, scale: step(x, scale))(*arrays[0])
    for got, want in zip(first, reference, strict=True):
        bits = [
            lax.bitcast_convert_type(
                x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32
            )
            for x in (got, want)
        ]
        if not bool(jnp.all(bits[0] == bits[1])):
            raise AssertionError(f"{op}: not bitwise the reference")
    if (
        np.clip(corner, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        != np.asarray(first[0][: len(corner)])
    ).any():
        raise AssertionError(f"{op}: not bitwise what ml_dtypes rounds to")

    candidates, errors = {"jaxfp8": program(step, arrays)}, {}
    for name, peer in list(_xla_peers.EXACT[op].items())[: options.size(100, 1)]:
        attempt(
            candidates,
            errors,
            f"XLA: {name}",
            lambda peer=peer: program(lambda x, s: peer(x, s, E4M3), arrays),
        )
    words = (
        arrays[0][0].size
        * (jnp.dtype(dtype).itemsize + (1 if op == "quantize" else 2))
        // 8
    )
    # The copy moves as many bytes as the op; half of them are read.
    candidates["copy"] = program(
        lambda x: x ^ 1,
        [(jnp.arange(i, i + words, dtype=jnp.int32),) for i in range(4)],
    )
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["gb_s"] = 8 * words / row["us"] * 1e-3
    return rows, errors
