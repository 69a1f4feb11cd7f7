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
from jaxfp8.ops import _moments

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BF16, F16, F32 = (np.dtype(dtype) for dtype in (ml_dtypes.bfloat16, np.float16, np.float32))
ONE = np.float32(1)


def numbers(*shape, dtype=F32):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def codes(*shape, dtype=E4M3):
    return numbers(*shape).astype(dtype)


def positive(*shape):
    return abs(numbers(*shape)) + 1


def op(name, *positions, **options):
    """A call of an op: arrays, then what stands behind them."""
    return lambda *arrays: getattr(ops, name)(*arrays, *positions, **options)


ROWS, MATRIX, BLOCK = numbers(3, 1001), numbers(217, 41, dtype=BF16), numbers(130, 264, dtype=BF16)
STATE = positive(2, 7), positive(2, 1), positive(2, 300), positive(2, 1)
LONG = 16392  # rows that do not fit into shared memory
# name -> function, arguments
OWN = {
    "amax": (ops.amax, MATRIX),
    "amax_to_scale": (jax.vmap(op("amax_to_scale", fp8_max=448.0)), positive(5), positive(5)),
    "delayed_scales": (lambda *x: ops.delayed_scales(x, [ONE] * 2, fp8_max=(448.0,) * 2), positive(7), positive(300)),
    "write_histories, a product": (
        lambda *x: ops.write_histories([[x[:2], x[2:4]]], [[x[4:6], x[4:6]]]),
        *(positive(7), positive(1), positive(300), positive(1), positive(1), positive(1)),
    ),
    "read_histories": (lambda *x: ops.read_histories([[x[:2]], [x[2:]]]), *STATE),
    "write_histories": (
        lambda *x: ops.write_histories([[x[:2], x[2:4]]], x[4:]),
        *(*STATE, positive(2, 8)),
    ),
    "quantize": (op("quantize", ONE, E4M3), MATRIX),
    "quantize, groups": (jax.vmap(op("quantize", ONE, E5M2)), ROWS),
    "quantize_transpose": (op("quantize_transpose", ONE, E4M3), MATRIX.astype(F16)),
    "quantize_transpose, sums": (op("quantize_transpose", ONE, E5M2, column_sums=True), BLOCK),
    "dequantize": (op("dequantize", ONE, F16), codes(9, 111, dtype=E5M2)),
    "encode_moment": (
        lambda *x: _moments.encode_moment(*x, squared=True, axis=1),
        *(codes(33, 300), positive(33, 3), np.ones((33, 3), np.int8), positive(33, 300), np.ones((33, 3), np.uint32)),
    ),
    "quantize_activation": (op("quantize_activation", ONE, E4M3, activation="gelu"), BLOCK),
    "gated": (op("quantize_activation", ONE, E4M3, activation="silu_gated"), numbers(33, 2, 41)),
    "quantize_activation_grad": (
        op("quantize_activation_grad", ONE, E5M2, activation="silu_gated", column_sums=True),
        *(numbers(133, 2, 41), numbers(133, 41)),
    ),
    "quantize_norm": (op("quantize_norm", None, ONE, E4M3, kind="rms", epsilon=1e-6), BLOCK, numbers(264)),
    "quantize_norm, long rows": (
        op("quantize_norm", ONE, E4M3, kind="layer", epsilon=1e-6),
        *(numbers(17, LONG, dtype=BF16), numbers(LONG), numbers(LONG)),
    ),
    "quantize_blocks": (op("quantize_blocks", E4M3, block=(1, 128)), BLOCK),
    "quantize_blocks_transpose": (op("quantize_blocks_transpose", E4M3, block=(128, 128)), MATRIX),
    "quantize_blocks_transpose, MX": (op("quantize_blocks_transpose", E4M3, block=(1, 32), scale="e8m0"), BLOCK),
    "quantize_blocks_transpose, rows": (op("quantize_blocks_transpose", E4M3, block=(1, None)), MATRIX),
    "transpose_blocks": (op("transpose_blocks", block=(1, 32)), codes(130, 264), positive(130, 9) * 0 + 1),
    "ragged_matmul": (op("ragged_matmul", ONE, ONE, np.int32([5, 0, 40, 3])), codes(64, 70), codes(4, 40, 70)),
    "ragged_matmul, whole chunks": (
        op("ragged_matmul", ONE, ONE, np.int32([5, 0, 40, 3])),
        codes(64, 784),
        codes(4, 40, 784),
    ),
    "ragged_matmul, contraction": (
        op("ragged_matmul", ONE, ONE, np.int32([70, 0, 61]), ragged="contraction"),
        *(codes(40, 150), codes(33, 150, dtype=E5M2)),
    ),
}
CUBLASLT = {
    "scaled_matmul": (op("scaled_matmul", ONE, ONE, out_dtype=F32), codes(49, 80), codes(112, 80)),
    "scaled_matmul, groups": (
        jax.vmap(op("scaled_matmul", ONE)),
        *(codes(3, 48, 80), codes(3, 112, 80), positive(3)),
    ),
    "block_scaled_matmul": (
        op("block_scaled_matmul", a_block=(1, 128), b_block=(128, 128)),
        *(codes(129, 200), codes(57, 200), positive(129, 2), positive(1, 2)),
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
