"""The first launch of one op in a process, inside of a graph: `python -m cuda.first_launches OP`, in tests/.

XLA records a program into a CUDA graph before anything of it has run, so that the first use of a kernel, with all that
CUDA and cuBLASLt set up then, falls into the capture. `test_gpu_graphs.py` runs every op so, in a process of its own.
"""

import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_blocks

from jaxfp8 import ops

# XLA records custom calls that allow it into graphs, also where there is only one.
GRAPHS = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL", "xla_gpu_graph_min_graph_size": 1}
E4M3, E5M2 = oracle.E4M3, oracle.E5M2
SCALE, ONE = np.float32([3]), np.float32([1])
SIZES = [40, 0, 88]  # of ragged groups
# By compute capability: blocks that cuBLASLt multiplies.
BLOCKS = {"9": {"a_block": (1, 128), "b_block": (128, 128)}, "1": {"a_block": (1, 32), "b_block": (1, 32)}}


def numbers(rng, *shape, dtype=oracle.BF16):
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-6, 6, shape)).astype(dtype)


def small_codes(rng, *shape, dtype=E4M3.dtype):
    """Codes of -1, 0 and 1: sums of up to 2**13 products are exact however a tensor core adds."""
    return rng.integers(-1, 2, shape).astype(np.float32).astype(dtype)


def product(a, b):
    return np.asarray(a, np.float32) @ np.asarray(b, np.float32).T


def bitwise(expected):
    """A check of outputs against `expected(*inputs)`, bit by bit."""

    def check(outputs, *inputs):
        for i, (got, array) in enumerate(zip(outputs, expected(*inputs), strict=True)):
            oracle.assert_bitwise(np.asarray(got).reshape(np.shape(array)), array, f"result {i}")

    return check


def delayed_scales(history, stored):
    moved, *pair = oracle.delayed_scale(history, stored[0], np.float32(E4M3.max))
    return moved, *(np.reshape(value, 1) for value in pair), np.zeros(1, np.float32)


def block_operands(rng):
    return small_codes(rng, 144, 256), small_codes(rng, 160, 256)


def block_product(a, b):
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    blocks = BLOCKS[capability[0]]
    dtype = np.float32 if blocks["a_block"] == (1, 128) else oracle_blocks.E8M0
    (rows, k), (cols, _) = a.shape, b.shape
    scales = (
        jnp.ones((-(-size // block[0]), k // block[1]), dtype)
        for size, block in zip((rows, cols), blocks.values(), strict=True)
    )
    return ops.block_scaled_matmul(a, b, *scales, **blocks, out_dtype=jnp.float32, precise=True)


def ragged_product(a, b):
    return ops.ragged_matmul(a, b, ONE, ONE, np.int32(SIZES), out_dtype=jnp.float32, precise=True)


def ragged_products(a, b):
    ends = np.cumsum(SIZES)
    return [np.concatenate([product(a[end - n : end], w) for n, end, w in zip(SIZES, ends, b, strict=True)])]


def normalized(outputs, x, gamma):
    values = oracle.norm(x, gamma, None, "rms", 1e-6, depth=x.shape[1] // 128 + 12)
    values.check(*map(np.asarray, outputs), SCALE[0], E4M3, what="rms")


# By op: the program, the inputs that a random generator gives, and the check of its outputs.
CASES = {
    "amax": (ops.amax, lambda rng: [numbers(rng, 130, 264)], bitwise(lambda x: [oracle.amax(x)])),
    "amax_to_scale": (
        lambda amax: ops.amax_to_scale(amax, ONE, fp8_max=448.0),
        lambda rng: [np.float32(rng.uniform(1, 9, 1))],
        bitwise(lambda amax: oracle.scale_pair(amax, ONE, np.float32(448))),
    ),
    "delayed_scales": (
        lambda history, stored: ops.delayed_scales([history], [stored], fp8_max=[448.0])[0],
        lambda rng: [np.float32(rng.uniform(1, 9, 16)), np.float32(rng.uniform(1, 9, 1))],
        bitwise(delayed_scales),
    ),
    "push_amaxes": (
        lambda history, amax: ops.push_amaxes([history], [amax]),
        lambda rng: [np.float32(rng.uniform(1, 9, 16)), np.float32(rng.uniform(1, 9, 1))],
        bitwise(lambda history, amax: [oracle.push_amax(history, amax[0])]),
    ),
    "quantize": (
        lambda x: ops.quantize(x, SCALE, E4M3.dtype),
        lambda rng: [numbers(rng, 130, 264)],
        bitwise(lambda x: oracle.quantize(x, SCALE[0], E4M3)),
    ),
    "quantize_transpose": (
        lambda x: ops.quantize_transpose(x, SCALE, E5M2.dtype),
        lambda rng: [numbers(rng, 130, 264, dtype=np.float32)],
        bitwise(lambda x: oracle.quantize_transpose(x, SCALE[0], E5M2)),
    ),
    "quantize_activation": (
        lambda x: ops.quantize_activation(x, SCALE, E4M3.dtype, activation="relu"),
        lambda rng: [numbers(rng, 130, 264)],
        bitwise(lambda x: oracle.quantize_transpose(np.maximum(x, 0), SCALE[0], E4M3)),
    ),
    "quantize_norm": (
        lambda x, gamma: ops.quantize_norm(x, gamma, None, SCALE, E4M3.dtype, kind="rms", epsilon=1e-6),
        lambda rng: [numbers(rng, 100, 4096), numbers(rng, 4096, dtype=np.float32)],
        normalized,
    ),
    "quantize_blocks_transpose": (
        lambda x: ops.quantize_blocks_transpose(x, E4M3.dtype, block=(1, 128)),
        lambda rng: [numbers(rng, 130, 264)],
        bitwise(lambda x: [part for y in (x, x.T) for part in oracle_blocks.quantize(y, E4M3, (1, 128))]),
    ),
    "dequantize": (
        lambda codes: ops.dequantize(codes, SCALE, jnp.bfloat16),
        lambda rng: [rng.choice(oracle.all_codes(E4M3), (130, 264))],
        bitwise(lambda codes: [oracle.dequantize(codes, SCALE[0], oracle.BF16)]),
    ),
    "scaled_matmul": (
        lambda a, b: ops.scaled_matmul(a, b, SCALE, ONE, out_dtype=jnp.float32, precise=True),
        lambda rng: [small_codes(rng, 48, 80), small_codes(rng, 112, 80, dtype=E5M2.dtype)],
        bitwise(lambda a, b: [product(a, b) * SCALE]),
    ),
    "block_scaled_matmul": (block_product, block_operands, bitwise(lambda a, b: [product(a, b)])),
    "ragged_matmul": (
        ragged_product,
        lambda rng: [small_codes(rng, sum(SIZES), 96), small_codes(rng, len(SIZES), 64, 96)],
        bitwise(ragged_products),
    ),
}


def check(op: str, **options) -> None:
    """Runs the op's program three times, the last time with other inputs: a graph gets new addresses."""
    run, inputs, check_outputs = CASES[op]
    program = jax.jit(run, **options)
    for seed in (0, 0, 1):
        arrays = inputs(np.random.default_rng(seed))
        check_outputs(jax.tree.leaves(program(*arrays)), *arrays)


def assert_recorded(folder: Path) -> None:
    """Raises AssertionError unless XLA's dump says that no custom call is left outside of a graph."""
    sequences = [path.read_text() for path in folder.glob("*thunk_sequence_after_thunk_passes.txt")]
    assert any("kCommandBuffer" in text for text in sequences), f"no graph in the dump: {sorted(folder.iterdir())}"
    # Lines of a graph's parts are indented.
    left = [line for text in sequences for line in text.splitlines() if "kCustomCall" in line and line[0] != " "]
    assert not left, f"custom calls outside of graphs: {left}"


def main(op: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # Read when the first program is compiled.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text"
        with ops.implementation("ffi"):
            check(op, compiler_options=GRAPHS)
        assert_recorded(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
