"""Every kernel once or twice, at small odd sizes: what `sanitize.py` runs under
compute-sanitizer.

    python tests/cuda/sanitizer_cases.py [--own]     --own: without cuBLASLt's products

A program is one op and what XLA puts around it; its inputs come from the host. Its
answer is not looked at.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8 import ops
from jaxfp8.inspect._op_calls import OPS, Kind
from jaxfp8.numerics import E4M3, E5M2
from jaxfp8.selftest import _cases

# no shared memory holds a row of LONG
ODD, BLOCKS, GROUPS, LONG = (217, 41, 1), (130, 264, 1), (3, 33, 65, 1), (17, 16392, 1)
# op -> its kinds: a shape, and the number of its options (inspect/_op_calls.py).
KINDS = dict.fromkeys(OPS, ((ODD, 0), (BLOCKS, 1))) | {
    "quantize": ((ODD, 0), (GROUPS, 1)),
    "quantize_activation": tuple(
        (BLOCKS, ops.ACTIVATIONS.index(name)) for name in ("gelu", "silu_gated")
    ),
    "quantize_activation_grad": tuple(
        (BLOCKS, ops.ACTIVATIONS.index(name)) for name in ("gelu", "silu_gated")
    ),
    "quantize_norm": ((BLOCKS, 0), (LONG, 1)),
    # Tiles, MX, squares and whole rows in both layouts; then rows of squares.
    "quantize_blocks_transpose": (
        (BLOCKS, 0),
        (BLOCKS, 2),
        (ODD, 6),
        (ODD, 8),
        (BLOCKS, 1),
    ),
    # By rows, also in whole chunks of the contraction, and by the contraction; then
    # both with scales of blocks, in two tiles of columns.
    "ragged_matmul": (
        ((64, 40, 70), 0),
        ((64, 40, 784), 4),
        ((40, 33, 150), 1),
        ((64, 200, 784), 2),
        ((300, 200, 40), 3),
    ),
    "scaled_matmul": (((49, 112, 80), 0), ((3, 48, 112, 80), 1)),
    "block_scaled_matmul": (((129, 57, 200), 6),),
}
CUBLASLT = "scaled_matmul", "block_scaled_matmul"


def _cases_of(op):
    for shape, index in KINDS[op]:
        dtype = np.dtype((jnp.bfloat16, np.float16, np.float32)[index % 3])
        case = _cases.case(
            op, Kind(shape, dtype, (E4M3, E5M2)[index % 2], index, hard=True)
        )
        yield f"{op}, {case.name}", (case.function, *case.arguments)


def _with_sums(name, *shapes, **options):
    """A call that also sums columns, whose last bits are free: no case of the
    selftest.
    """
    arrays = [
        np.random.default_rng(0).standard_normal(shape).astype(jnp.bfloat16)
        for shape in shapes
    ]
    op, scale = getattr(ops, name), np.float32(1)
    return lambda *arrays: op(
        *arrays, scale, E5M2.dtype, column_sums=True, **options
    ), *arrays


# name -> function, arguments
OWN = {
    name: case for op in OPS if op not in CUBLASLT for name, case in _cases_of(op)
} | {
    "quantize_transpose, sums": _with_sums("quantize_transpose", BLOCKS),
    "quantize_activation_grad, sums": _with_sums(
        "quantize_activation_grad", (133, 2, 41), (133, 41), activation="silu_gated"
    ),
}
PRODUCT_CASES = {name: case for op in CUBLASLT for name, case in _cases_of(op)}


def run(cases):
    for name, (function, *arguments) in cases.items():
        print(name, flush=True)
        jax.device_get(jax.jit(function)(*jax.device_put(arguments)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--own", action="store_true", help="without cuBLASLt's products"
    )
    run(OWN if parser.parse_args().own else OWN | PRODUCT_CASES)
