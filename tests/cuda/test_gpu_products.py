"""Products on a GPU, cuBLASLt's and our own, within the bound of the device's tensor cores; measured plans."""

import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_blocks
import pytest
from ops import cases

from jaxfp8 import ops
from jaxfp8.autotune import _plan_files

from .gpu import DTYPE_IDS, DTYPES, FORMATS, GRAPHS, assert_all_bitwise, custom_calls as custom_calls, random_codes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("m, n, k", [(16, 32, 48), (256, 512, 1024), (1000, 520, 300), (17, 33, 65)])
@pytest.mark.parametrize("out_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("precise", [False, True], ids=["fast", "precise"])
def test_product(m, n, k, out_dtype, precise):
    for a_format, b_format in itertools.product(FORMATS, FORMATS):
        a, b = random_codes((m, k), a_format, 1), random_codes((n, k), b_format, 2)
        a_scale, b_scale = np.float32(2.0**-9), np.float32(0.3 * 2.0**-9)
        got = ops.scaled_matmul(a, b, a_scale, b_scale, out_dtype=out_dtype, precise=precise)
        expected = oracle.scaled_matmul(
            a, b, a_scale, b_scale, out_dtype=out_dtype, **cases.accumulation("cuda", precise)
        )
        expected.check(got, f"{a_format.name} by {b_format.name}")


@pytest.mark.parametrize("out_dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_and_accumulator(out_dtype, accumulate):
    m, n, k = 64, 96, 128
    a, b = random_codes((m, k), oracle.E4M3, 1), random_codes((n, k), oracle.E4M3, 2)
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(n).astype(oracle.F16 if out_dtype == oracle.F16 else oracle.BF16)
    accumulator = rng.standard_normal((m, n)).astype(np.float32) if accumulate else None
    scales = (np.float32(2.0**-8), np.float32(2.0**-8))
    for bias_or_none in (None, bias):
        options = {"bias": bias_or_none, "accumulator": accumulator, "out_dtype": out_dtype}
        got = ops.scaled_matmul(a, b, *scales, precise=True, **options)
        oracle.scaled_matmul(a, b, *scales, **options, **cases.accumulation("cuda", precise=True)).check(got)


def test_accumulation_in_place():
    """A donated accumulator: C and D are one buffer."""
    a, b = random_codes((64, 128), oracle.E4M3, 1), random_codes((96, 128), oracle.E4M3, 2)
    one = np.float32(2.0**-8)

    @jax.jit
    def four_times(accumulator):
        def body(_, total):
            return ops.scaled_matmul(a, b, one, one, accumulator=total, out_dtype=jnp.float32, precise=True)

        return jax.lax.fori_loop(0, 4, body, accumulator)

    exact = oracle.scaled_matmul(a, b, one, one, **cases.accumulation("cuda", precise=True))
    error = np.abs(np.asarray(four_times(jnp.zeros((64, 96), jnp.float32)), np.float64) - 4 * exact.exact)
    # Four products, each with the bound of one, and four additions of partial sums of at most four products.
    assert (error <= 4 * exact.bound + 4 * oracle.PRECISE * 4 * np.abs(exact.exact)).all()


@pytest.mark.parametrize("own_scales", [False, True])
def test_batched_product(own_scales):
    g, m, n, k = 3, 32, 48, 64
    a, b = random_codes((g, m, k), oracle.E4M3, 1), random_codes((g, n, k), oracle.E5M2, 2)
    scales = np.float32([0.5, 2, 3]) * np.float32(2.0**-9)
    if not own_scales:
        scales = np.full_like(scales, scales[0])

    def product(a, b, s):
        return ops.scaled_matmul(a, b, s, np.float32(2.0**-9), out_dtype=jnp.float32, precise=True)

    if own_scales:
        got = jax.vmap(product)(a, b, scales)
    else:
        got = jax.vmap(product, in_axes=(0, 0, None))(a, b, scales[0])
    for i in range(g):
        options = cases.accumulation("cuda", precise=True)
        oracle.scaled_matmul(a[i], b[i], scales[i], np.float32(2.0**-9), **options).check(got[i], f"group {i}")


@pytest.mark.parametrize("a_scale, b_scale", [(1.7e-35, 1.1e-5), (1.1e-5, 1.7e-35), (1.3e25, 1.7e20)])
def test_scales_without_a_normal_product(record_property, a_scale, b_scale):
    """cuBLASLt does not say in which order it multiplies: what it does is recorded, and no wrong number is accepted."""
    a, b = np.full((16, 32), 16, oracle.E4M3.dtype), np.full((16, 32), 16, oracle.E4M3.dtype)
    a[0] = 0
    got = np.asarray(ops.scaled_matmul(a, b, np.float32(a_scale), np.float32(b_scale), out_dtype=jnp.float32))
    right = np.float32(float(np.float32(a_scale)) * float(np.float32(b_scale)) * 2.0**13)
    record_property("zero", str(got[0, 0]))
    record_property("largest", f"{got[1, 0]}, exact {right}")
    np.testing.assert_array_equal(got[1:], np.full((15, 16), got[1, 0]))
    assert got[1, 0] == 0 or not np.isfinite(got[1, 0]) or abs(got[1, 0] / right - 1) < 2.0**-9


# What cuBLASLt multiplies, by the compute capabilities that have it: powers of two on 10 and 12 as blocks of 32.
OF_HOPPER = (((1, None), (1, None)), ((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128)))
SCALED_BLOCKS = {
    **{(blocks, False): ("9.0",) for blocks in OF_HOPPER},
    **{(blocks, True): ("9.0", "10", "12") for blocks in OF_HOPPER},
    (((1, 32), (1, 32)), False): ("10", "12"),
}


@pytest.mark.parametrize("blocks, power_2_scale", SCALED_BLOCKS, ids=str)
@pytest.mark.parametrize("m, n, k", [(16, 16, 128), (272, 144, 640), (129, 57, 200), (512, 256, 2048)])
def test_block_scaled(blocks, power_2_scale, m, n, k):
    """Scales that differ by powers of two from block to block show where cuBLASLt reads each."""
    capability = jax.devices("gpu")[0].compute_capability
    capabilities = SCALED_BLOCKS[blocks, power_2_scale]
    if not capability.startswith(capabilities):
        pytest.skip(f"cuBLASLt has this on compute capability {capabilities}, this GPU has {capability}")
    rng, sides = np.random.default_rng(0), []
    for rows, block in zip((m, n), blocks, strict=True):
        x = rng.standard_normal((rows, k)) * 2.0 ** (np.arange(rows)[:, None] % 5 + np.arange(k) // 32 % 7)
        scaling = {"scale": "e8m0"} if block[1] == 32 else {"power_2_scale": power_2_scale}
        sides.append(oracle_blocks.quantize(np.float32(x), oracle.E4M3, block, **scaling))
    (a, a_scale), (b, b_scale) = sides
    options = {"a_block": blocks[0], "b_block": blocks[1]}
    product = functools.partial(ops.block_scaled_matmul, **options, power_2_scale=power_2_scale, out_dtype=jnp.float32)
    for precise in (False, True):
        product = functools.partial(product, precise=precise)
        got = jax.jit(product)(a, b, a_scale, b_scale)
        expected = oracle_blocks.matmul(a, b, a_scale, b_scale, **options, **cases.accumulation("cuda", precise))
        expected.check(got, f"{blocks}, precise {precise}")
        stacked = [np.stack([x, np.roll(x, 1, axis=0)]) for x in (a, b)]
        pair = jax.jit(jax.vmap(product, (0, 0, None, None)))(*stacked, a_scale, b_scale)
        expected.check(pair[0], f"{blocks}, group 0")


# Groups around chunks of 16, slices of 64 and tiles of 128; odd sizes, which go element by element.
RAGGED = [
    ([40, 60, 50], 150, 64, 32),
    ([10, 0, 130, 1, 64], 304, 80, 40),
    ([16, 48, 64], 128, 208, 16),
    ([5, 90], 99, 33, 7),
    ([0, 0], 30, 32, 16),
    ([1] * 64, 100, 256, 136),
    ([700, 0, 1500, 3], 2500, 512, 384),
]


@pytest.mark.parametrize("sizes, m, k, n", RAGGED)
@pytest.mark.parametrize("ragged", ["rows", "contraction"])
@pytest.mark.parametrize("precise", [False, True], ids=["fast", "precise"])
def test_ragged_product(sizes, m, k, n, ragged, precise):
    shapes = ((m, k), (len(sizes), n, k)) if ragged == "rows" else ((k, m), (n, m))
    scales = np.float32(2.0**-9), np.float32(0.3 * 2.0**-9)
    for a_format, b_format, out_dtype in itertools.product(FORMATS, FORMATS, DTYPES):
        a, b = random_codes(shapes[0], a_format, 1), random_codes(shapes[1], b_format, 2)
        got = ops.ragged_matmul(a, b, *scales, np.int32(sizes), ragged=ragged, out_dtype=out_dtype, precise=precise)
        options = {"out_dtype": out_dtype} | cases.accumulation("cuda", precise)
        oracle.ragged_matmul(a, b, *scales, sizes, **options).check(got, f"{a_format.name} by {b_format.name}")


@pytest.mark.parametrize("ragged", ["rows", "contraction"])
def test_ragged_neighbours(ragged):
    """NaN of other groups, and of rows of none, enters nothing; sizes that change replay one program, and one graph."""
    m, k, n = 304, 96, 64
    a = random_codes((m, k) if ragged == "rows" else (k, m), oracle.E4M3, 1)
    b = random_codes((3, n, k) if ragged == "rows" else (n, m), oracle.E5M2, 2)
    rows = a if ragged == "rows" else a.T
    rows[139] = rows[260:] = np.nan
    one = np.float32(2.0**-9)

    def product(a, b, sizes):
        return ops.ragged_matmul(a, b, one, one, sizes, ragged=ragged, out_dtype=jnp.float32, precise=True)

    for options in ({"xla_gpu_enable_command_buffer": ""}, GRAPHS):
        run = jax.jit(product, compiler_options=options)
        for sizes in ([100, 39, 60], [0, 139, 121], [139, 1, 120], [0, 0, 0]):
            expected = oracle.ragged_matmul(a, b, one, one, sizes, **cases.accumulation("cuda", precise=True))
            expected.check(run(a, b, np.int32(sizes)), f"{sizes}")


# ---------------------------------------------------------------------------------------------------------------- plans

SHAPES = ((48, 80, 112), (512, 384, 256), (2048, 1024, 1024))


def products(operands):
    one = np.float32(2.0**-8)
    return [ops.scaled_matmul(a, b, one, one, out_dtype=jnp.float32, precise=True) for a, b in operands]


def products_inputs():
    return [
        (random_codes((m, k), oracle.E4M3, i), random_codes((n, k), oracle.E5M2, i + 9))
        for i, (m, n, k) in enumerate(SHAPES)
    ]


# A later process: its plans come from the files, and its bytes are those of the process that measured.
LATER = """
import sys
import jax, jax.numpy as jnp, numpy as np
sys.path.insert(0, sys.argv[1])
from cuda.test_gpu_products import products, products_inputs
from jaxfp8.ops import _ffi
outputs = jax.jit(products, compiler_options={"xla_gpu_enable_command_buffer": ""})(products_inputs())
np.savez(sys.argv[2], counts=_ffi.count_gemm_plans(), *map(np.asarray, outputs))
"""


@pytest.mark.alone
def test_autotune(tmp_path):
    """Measured algorithms are used, in graphs too, keep the bound, and are found again by the next process.

    The counts also show that buffers lie as plans assume (kGemmAlignment).
    """
    inputs = products_inputs()
    environment = os.environ | {"JAXFP8_CACHE_DIR": str(tmp_path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    script = "import sys, jaxfp8; sys.path.insert(0, sys.argv[1]); from cuda.test_gpu_products import *\n"
    script += "print(jaxfp8.autotune(products, products_inputs()))"
    tests = str(Path(__file__).parents[1])
    for _ in range(2):  # measured, then known
        subprocess.run([sys.executable, "-c", script, tests], env=environment, check=True)
    saved = tmp_path / "outputs.npz"
    for _ in range(2):
        subprocess.run([sys.executable, "-c", LATER, tests, str(saved)], env=environment, check=True)
        with np.load(saved) as outputs:
            assert tuple(outputs["counts"]) == (len(SHAPES), 0)
            later = [outputs[f"arr_{i}"] for i in range(len(SHAPES))]
        for (a, b), output in zip(inputs, later, strict=True):
            options = cases.accumulation("cuda", precise=True)
            oracle.scaled_matmul(a, b, np.float32(2.0**-8), np.float32(2.0**-8), **options).check(output)
    # Here, where the plans have not been loaded before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXFP8_CACHE_DIR", str(tmp_path))
        _plan_files.store.load()
    for options in ({}, GRAPHS):
        assert_all_bitwise(jax.jit(products, compiler_options=options)(inputs), later, "products")
