"""Every kernel once or twice, at small odd sizes: what `sanitize.py` runs under compute-sanitizer.

    python tests/cuda/sanitizer_cases.py [--own]     --own: without cuBLASLt's products

A program is one op and what XLA puts around it; its inputs come from the host. Its answer is not looked at.
"""

import argparse

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxfp8 import ops

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BF16, F16, F32 = (np.dtype(dtype) for dtype in (ml_dtypes.bfloat16, np.float16, np.float32))
ONE = np.float32(1)


def numbers(*shape, dtype=F32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def codes(*shape, dtype=E4M3):
    return numbers(*shape).astype(dtype)


def positive(*shape):
    return abs(numbers(*shape)) + 1


def blocks(op, block, **options):
    return lambda x: op(x, E4M3, block=block, **options)


# name -> function, arguments
OWN = {
    "amax": (ops.amax, numbers(37, 41, dtype=BF16)),
    "amax_to_scale": (jax.vmap(lambda a, s: ops.amax_to_scale(a, s, fp8_max=448.0)), positive(5), positive(5)),
    "delayed_scales": (
        lambda *histories: ops.delayed_scales(histories, [ONE] * 2, fp8_max=(448.0, 57344.0)),
        positive(7),
        positive(300),
    ),
    "push_amaxes": (lambda *x: ops.push_amaxes(x[:2], x[2:]), positive(7), positive(300), positive(1), positive(1)),
    "quantize": (lambda x: ops.quantize(x, ONE, E4M3), numbers(217, 41, dtype=BF16)),
    "quantize, groups": (jax.vmap(lambda x: ops.quantize(x, ONE, E5M2)), numbers(3, 1001)),
    "quantize_transpose": (lambda x: ops.quantize_transpose(x, ONE, E4M3), numbers(217, 41, dtype=F16)),
    "quantize_transpose, sums": (
        lambda x: ops.quantize_transpose(x, ONE, E5M2, column_sums=True),
        numbers(130, 264, dtype=BF16),
    ),
    "dequantize": (lambda x: ops.dequantize(x, ONE, F16), codes(9, 111, dtype=E5M2)),
    "quantize_activation": (
        lambda x: ops.quantize_activation(x, ONE, E4M3, activation="gelu"),
        numbers(130, 264, dtype=BF16),
    ),
    "quantize_activation, gated": (
        lambda x: ops.quantize_activation(x, ONE, E4M3, activation="silu_gated"),
        numbers(33, 2, 41),
    ),
    "quantize_norm": (
        lambda x, gamma: ops.quantize_norm(x, gamma, None, ONE, E4M3, kind="rms", epsilon=1e-6),
        numbers(33, 520, dtype=BF16),
        numbers(520),
    ),
    # Rows that do not fit into shared memory.
    "quantize_norm, long rows": (
        lambda x, gamma, beta: ops.quantize_norm(x, gamma, beta, ONE, E4M3, kind="layer", epsilon=1e-6),
        numbers(17, 16392, dtype=BF16),
        numbers(16392),
        numbers(16392),
    ),
    "quantize_blocks": (blocks(ops.quantize_blocks, (1, 128)), numbers(130, 264, dtype=BF16)),
    "quantize_blocks_transpose": (blocks(ops.quantize_blocks_transpose, (128, 128)), numbers(217, 41)),
    "quantize_blocks_transpose, MX": (
        blocks(ops.quantize_blocks_transpose, (1, 32), scale="e8m0"),
        numbers(130, 264, dtype=BF16),
    ),
    "quantize_blocks_transpose, rows": (blocks(ops.quantize_blocks_transpose, (1, None)), numbers(130, 41, dtype=BF16)),
    "ragged_matmul": (
        lambda a, b, sizes: ops.ragged_matmul(a, b, ONE, ONE, sizes),
        codes(64, 70),
        codes(4, 40, 70),
        np.int32([5, 0, 40, 3]),
    ),
    "ragged_matmul, contraction": (
        lambda a, b, sizes: ops.ragged_matmul(a, b, ONE, ONE, sizes, ragged="contraction"),
        codes(40, 150),
        codes(33, 150, dtype=E5M2),
        np.int32([70, 0, 61]),
    ),
}
CUBLASLT = {
    "scaled_matmul": (
        lambda a, b, c: ops.scaled_matmul(a, b, ONE, ONE, accumulator=c, out_dtype=F32),
        codes(49, 80),
        codes(112, 80),
        numbers(49, 112),
    ),
    "scaled_matmul, groups": (
        jax.vmap(lambda a, b, scale: ops.scaled_matmul(a, b, scale, ONE)),
        codes(3, 48, 80),
        codes(3, 112, 80),
        positive(3),
    ),
    "block_scaled_matmul": (
        lambda a, b, *scales: ops.block_scaled_matmul(a, b, *scales, a_block=(1, 128), b_block=(128, 128)),
        codes(129, 200),
        codes(57, 200),
        positive(129, 2),
        positive(1, 2),
    ),
}


def run(cases):
    for name, (function, *arguments) in cases.items():
        print(name, flush=True)
        jax.device_get(jax.jit(function)(*jax.device_put(arguments)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--own", action="store_true", help="without cuBLASLt's products")
    run(OWN if parser.parse_args().own else OWN | CUBLASLT)
