"""The CUDA kernels on a GPU: what the emulator cannot show. Products are in test_gpu_products.py.

Codes, amaxes and dequantized values bit by bit against the oracle; repeatability, graph capture, streams, and sizes
above 2**31. tests/ops runs its own cases on the GPU too.
"""

import concurrent.futures
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_blocks
import pytest
from ops import cases

from jaxfp8 import ops
from jaxfp8.ops._quantize import quantize_with
from jaxfp8.ops._quantize_transpose import quantize_transpose_with

from .gpu import (
    DTYPE_IDS,
    DTYPES,
    FORMATS,
    GRAPHS,
    assert_all_bitwise,
    custom_calls as custom_calls,
    random_codes,
    random_values,
)

pytestmark = pytest.mark.gpu

SCALES = np.float32([1, 2.0**-7, 3.7, 2.0**40, 2.0**-126, 2.0**126, np.finfo(np.float32).max])
STRANGE_SCALES = np.float32([0.0, -0.0, -1.0, -(2.0**100), np.inf, -np.inf, np.nan])


def all_values(dtype, fmt):
    if dtype.itemsize == 2:
        return oracle.all_half_codes(dtype)
    return np.concatenate([oracle.f32_corner_cases(), oracle.rounding_probes(fmt)])


# ----------------------------------------------------------------------------------------------------- elementwise ops


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_value(dtype, fmt):
    """The hardware's conversions against the oracle's: all 16-bit values, the f32 corner cases and boundaries."""
    x = all_values(dtype, fmt)
    x = np.resize(x, (x.size // 128, 128))
    for scale in np.concatenate([SCALES, STRANGE_SCALES]):
        assert_all_bitwise(ops.quantize(x, scale, fmt.dtype), oracle.quantize(x, scale, fmt), f"quantize, {scale!r}")
        got = ops.quantize_transpose(x, scale, fmt.dtype)
        assert_all_bitwise(got, oracle.quantize_transpose(x, scale, fmt), f"quantize_transpose, {scale!r}")
    oracle.assert_bitwise(ops.amax(x), oracle.amax(x), "amax")


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_code(dtype, fmt):
    codes = oracle.all_codes(fmt)
    for scale_inv in np.concatenate([SCALES, 1 / SCALES, STRANGE_SCALES]).astype(np.float32):
        got = ops.dequantize(codes, scale_inv, dtype)
        oracle.assert_bitwise(got, oracle.dequantize(codes, scale_inv, dtype), f"dequantize, {scale_inv!r}")


@pytest.mark.parametrize("count", [1, 255, 257, 10_000])
def test_scales(count):
    """The hardware's division is the correctly rounded one."""
    values = np.random.default_rng(count).permutation(oracle.f32_corner_cases())
    amax, stored = np.resize(values, count), np.resize(values[::-1], count)
    for fp8_max, margin in itertools.product((448.0, 57344.0), (0, 20, -64, 64)):
        pairs = jax.vmap(lambda a, s, f=fp8_max, m=margin: ops.amax_to_scale(a, s, fp8_max=f, margin=m))(amax, stored)
        expected = oracle.scale_pair(amax, stored, np.float32(fp8_max * 2.0**-margin))
        assert_all_bitwise([pair[:, 0] for pair in pairs], expected, f"amax_to_scale, margin {margin}")


@pytest.mark.parametrize("lengths", [(1,), (1, 2, 3), (1024,) * 3, tuple(range(250, 266))], ids=str)
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_histories(lengths, algo):
    rng = np.random.default_rng(len(lengths))
    histories = [rng.choice(oracle.f32_corner_cases(), length) for length in lengths]
    stored, amaxes = (list(rng.choice(oracle.f32_corner_cases(), (len(lengths), 1))) for _ in range(2))
    fp8_max = tuple(np.resize([448.0, 57344.0], len(lengths)))
    step = jax.jit(lambda h, s: ops.delayed_scales(h, s, fp8_max=fp8_max, algo=algo))
    for _ in range(3):  # the amax buffers must be zero every time
        scales = step(histories, stored)
        pushed = jax.jit(ops.push_amaxes)([scale.history for scale in scales], amaxes)
        for i, (scale, after) in enumerate(zip(scales, pushed, strict=True)):
            numerator = np.float32(fp8_max[i])
            moved, *pair = oracle.delayed_scale(histories[i], stored[i][0], numerator, algo == "most_recent")
            expected = moved, *(np.reshape(v, 1) for v in pair), np.zeros(1, np.float32)
            assert_all_bitwise(scale, expected, f"quantizer {i}")
            oracle.assert_bitwise(after, oracle.push_amax(moved, amaxes[i][0]), f"history {i}")


@pytest.mark.parametrize("m, n", [(1, 1), (129, 257), (1000, 520), (4096, 1024)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_column_sums(m, n, dtype):
    x = random_values((m, n), dtype, m)
    run = jax.jit(lambda x: ops.quantize_transpose(x, np.float32(3), jnp.float8_e5m2, column_sums=True))
    *others, sums = run(x)
    assert_all_bitwise(others, oracle.quantize_transpose(x, np.float32(3), oracle.E5M2), "with sums")
    oracle.assert_column_sums(sums, x)
    for _ in range(5):
        oracle.assert_bitwise(run(x)[-1], np.asarray(sums), "again")


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_counts(dtype, fmt):
    """Of every value and of many: XLA's products at the boundaries."""
    many = random_values((1031, 520), dtype)
    for scale in (*SCALES, *STRANGE_SCALES):
        for x in (all_values(dtype, fmt)[None], many):
            found = ops.count_saturated_and_flushed(x, scale, fmt.dtype)
            oracle.assert_bitwise(found, oracle.counts(x, scale, fmt), repr(scale))


def test_codes_without_an_amax():
    x, options = random_values((300, 520), oracle.BF16), {"amax": None, "with_amax": False}
    data, data_t, _ = oracle.quantize_transpose(x, np.float32(3), oracle.E4M3)
    got, _ = quantize_with(x, np.float32(3), oracle.E4M3.dtype, **options)
    oracle.assert_bitwise(got, data, "quantize")
    options |= {"rows": 1, "cols": 1, "column_sums": False}
    *got, _ = quantize_transpose_with(x, np.float32(3), oracle.E4M3.dtype, **options)
    assert_all_bitwise(got, (data, data_t), "quantize_transpose")


def test_amax_so_far():
    """In place, for a zero that another kernel has written, and in a copy of what the program needs otherwise."""
    x = random_values((300, 520), oracle.BF16)

    @jax.jit
    def step(x, amax):
        (scale,) = ops.delayed_scales([amax], [amax], fp8_max=[448.0])
        tops = []
        for op in (ops.quantize, ops.quantize_transpose):
            tops += [op(x, scale.scale, jnp.float8_e4m3fn, amax=so_far)[-1] for so_far in (scale.amax, amax)]
        return tops, amax

    for amax in np.float32([[1e-3], [1e30]]):
        tops, same = step(x, amax)
        oracle.assert_bitwise(same, amax, "the operand")
        for top, so_far in zip(tops, (0, amax[0]) * 2, strict=True):
            oracle.assert_bitwise(top, np.maximum(np.float32(so_far), oracle.amax(x)), f"amax so far {so_far}")


@pytest.mark.parametrize("m, n", [(1, 1), (7, 9), (128, 128), (16, 8), (130, 264), (217, 41), (1000, 1000), (4096, 97)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_shapes(m, n, dtype):
    fmt = oracle.E4M3
    x = random_values((m, n), dtype, m)
    scale = np.float32(3)
    assert_all_bitwise(ops.quantize(x, scale, fmt.dtype), oracle.quantize(x, scale, fmt), "quantize")
    got = ops.quantize_transpose(x, scale, fmt.dtype)
    assert_all_bitwise(got, oracle.quantize_transpose(x, scale, fmt), "quantize_transpose")
    oracle.assert_bitwise(ops.amax(x), oracle.amax(x), "amax")
    codes = oracle.quantize(x, scale, fmt)[0]
    oracle.assert_bitwise(ops.dequantize(codes, scale, dtype), oracle.dequantize(codes, scale, dtype), "dequantize")


@pytest.mark.parametrize("groups, size", [(3, 1000), (7, 40_000), (5000, 3)])
def test_groups(groups, size):
    fmt = oracle.E5M2
    x = random_values((groups, size), oracle.BF16, groups)
    scales = (2.0 ** np.random.default_rng(1).uniform(-5, 5, groups)).astype(np.float32)
    data, top = jax.vmap(lambda x, s: ops.quantize(x, s, fmt.dtype))(x, scales)
    for i in (0, 1, groups // 2, groups - 1):
        assert_all_bitwise((data[i], top[i]), oracle.quantize(x[i], scales[i], fmt), f"group {i}")


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """The last elements of a tensor that 32-bit offsets do not reach."""
    size = 2**31 + 4096 + 5
    x = jnp.ones((size,), jnp.bfloat16).at[-1].set(-3)
    data, top = ops.quantize(x, np.float32(2), jnp.float8_e4m3fn)
    assert float(top) == 3 and float(data[-1]) == -6
    assert bool(jnp.all(data[-5000:-1].astype(jnp.float32) == 2))


# ---------------------------------------------------------------------------------------------------- fused producers


@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "silu_gated", "gelu_gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("m, n", [(128, 128), (130, 264), (217, 41), (1, 9)])
def test_activations(name, dtype, m, n):
    """The hardware's exponential and reciprocal keep the manual's bounds; with and without data_t."""
    shape = (m, 2, n) if name.endswith("_gated") else (m, n)
    x = (3 * np.random.default_rng(m).standard_normal(shape)).astype(np.float32).astype(dtype)
    values, scale = oracle.activation(x, name), np.float32(3.3)
    for fmt in FORMATS:
        outputs = ops.quantize_activation(x, scale, fmt.dtype, activation=name, amax=np.float32(0.5))
        values.check(*map(np.asarray, outputs), scale, fmt, start=0.5, what=name)
        data, _, top = ops.quantize_activation(x, scale, fmt.dtype, activation=name, transpose=False)
        values.check(np.asarray(data), None, np.asarray(top), scale, fmt, what=name)


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_activation_of_every_half(name):
    x = oracle.all_half_codes(oracle.BF16).reshape(256, 256)
    for scale in np.float32([1, 2.0**-8, 2.0**60]):
        outputs = ops.quantize_activation(x, scale, oracle.E5M2.dtype, activation=name)
        oracle.activation(x, name).check(*map(np.asarray, outputs), scale, oracle.E5M2, what=name)


# Rows that fit shared memory and rows that do not, vectors and elements.
@pytest.mark.parametrize("kind, has_beta", [("rms", False), ("layer", False), ("layer", True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("m, n", [(16, 128), (100, 4096), (33, 16384), (217, 41), (1, 5001)])
def test_norms(kind, has_beta, dtype, m, n):
    rng = np.random.default_rng(n)
    x = (rng.standard_normal((m, n)) + rng.uniform(-3, 3, (m, 1))).astype(np.float32).astype(dtype)
    gamma, beta = rng.standard_normal((2, n)).astype(np.float32)
    beta = beta if has_beta else None
    scale = np.float32(30)
    values = oracle.norm(x, gamma, beta, kind, 1e-6, depth=n // 128 + 12)
    for fmt in FORMATS:
        outputs = ops.quantize_norm(x, gamma, beta, scale, fmt.dtype, kind=kind, epsilon=1e-6)
        values.check(*map(np.asarray, outputs), scale, fmt, what=kind)
        data, _, top = ops.quantize_norm(x, gamma, beta, scale, fmt.dtype, kind=kind, epsilon=1e-6, transpose=False)
        values.check(np.asarray(data), None, np.asarray(top), scale, fmt, what=kind)


QUANTIZED_BLOCKS = {
    "row-wise": {"block": (1, None)},
    "1x128": {"block": (1, 128), "power_2_scale": True},
    "128x128": {"block": (128, 128)},
    "MX, ceil": {"block": (1, 32), "scale": "e8m0"},
    "MX, floor": {"block": (1, 32), "scale": "e8m0", "rounding": "floor"},
}


@pytest.mark.parametrize("options", QUANTIZED_BLOCKS.values(), ids=QUANTIZED_BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("m, n", [(1, 1), (7, 9), (128, 128), (130, 264), (217, 41), (512, 640)])
def test_quantized_blocks(m, n, dtype, options):
    """Both layouts, one layout, groups; again from a graph, with the same bytes."""
    x = random_values((2, m, n), dtype, m)
    x[0, 0, 0], x[1, -1, -1] = np.nan, np.inf
    for fmt in FORMATS:
        expected = [
            [part for of in (matrix, matrix.T) for part in oracle_blocks.quantize(of, fmt, **options)] for matrix in x
        ]
        both = jax.jit(functools.partial(ops.quantize_blocks_transpose, dtype=fmt.dtype, **options))
        again = jax.jit(both, compiler_options=GRAPHS)
        for run in (both, again, again, again):
            got = [np.asarray(part) for part in run(x)]
            for i in range(2):
                assert_all_bitwise([part[i] for part in got], expected[i], f"{fmt.name}, group {i}")
        one = ops.quantize_blocks(x[0], fmt.dtype, **options)
        assert_all_bitwise(one, expected[0][:2], f"{fmt.name}, one layout")


@pytest.mark.parametrize("scale, rounding", [("f32", "ceil"), ("e8m0", "ceil"), ("e8m0", "floor")])
@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_value_in_blocks(dtype, fmt, scale, rounding):
    x = all_values(dtype, fmt)
    x = np.resize(x, (-(-x.size // 256), 256))
    options = {"block": (1, 32) if scale == "e8m0" else (1, 128), "scale": scale, "rounding": rounding}
    got = ops.quantize_blocks_transpose(x, fmt.dtype, **options)
    expected = [part for of in (x, x.T) for part in oracle_blocks.quantize(of, fmt, **options)]
    assert_all_bitwise(got, expected, f"{options}")


# -------------------------------------------------------------------------------------------------- graphs and streams


def chain(x, kernel, scale):
    """Every op once, but amax_to_scale."""
    histories, stored = [jnp.full((4,), 448, jnp.float32)] * 2, [1 / scale] * 2
    for_x, for_kernel = ops.delayed_scales(histories, stored, fp8_max=(448.0, 448.0))
    q, q_t, top = ops.quantize_transpose(x, scale, jnp.float8_e4m3fn, amax=for_x.amax)
    k, k_top = ops.quantize(kernel, for_kernel.scale, jnp.float8_e4m3fn, amax=for_kernel.amax)
    y = ops.scaled_matmul(q, k, 1 / scale, for_kernel.scale_inv)
    pushed = ops.push_amaxes([for_x.history, for_kernel.history], [top, k_top])
    h = ops.quantize_activation(y, scale, jnp.float8_e4m3fn, activation="gelu", amax=top)
    gamma = jnp.ones(y.shape[1:])
    normed = ops.quantize_norm(y, gamma, None, scale, jnp.float8_e4m3fn, kind="rms", epsilon=1e-6)
    back = ops.dequantize(q_t, 1 / scale, jnp.bfloat16)
    return q_t, top, k_top, y, ops.amax(y), back, *pushed, *h, *normed


def chain_inputs():
    return random_values((256, 512), oracle.BF16, 1), random_values((384, 512), np.dtype(np.float32), 2), np.float32(4)


def test_same_bytes_every_time():
    """Repeated runs of one program, as XLA schedules them: with and without command buffers."""
    inputs = chain_inputs()
    plain = jax.jit(chain, compiler_options={"xla_gpu_enable_command_buffer": ""})
    graph = jax.jit(chain, compiler_options=GRAPHS)
    expected = [np.asarray(v) for v in plain(*inputs)]
    for run in (plain, graph):
        for _ in range(5):
            assert_all_bitwise(run(*inputs), expected, "chain")


def test_first_call_inside_a_graph():
    """A GEMM of a new shape, whose plan is made while XLA captures."""
    a, b = random_codes((48, 80), oracle.E4M3, 1), random_codes((112, 80), oracle.E4M3, 2)
    one = np.float32(2.0**-8)

    def product(a, b):
        return ops.scaled_matmul(a, b, one, one, precise=True, out_dtype=jnp.float32)

    run = jax.jit(product, compiler_options=GRAPHS)
    for _ in range(3):
        oracle.scaled_matmul(a, b, one, one, **cases.accumulation("cuda", precise=True)).check(run(a, b))


@pytest.mark.alone
def test_threads():
    """Programs from several host threads at once: shared handles and plans."""
    inputs = chain_inputs()
    run = jax.jit(chain)
    expected = [np.asarray(v) for v in run(*inputs)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for outputs in pool.map(lambda _: [np.asarray(v) for v in run(*inputs)], range(64)):
            assert_all_bitwise(outputs, expected, "chain")


def test_two_streams():
    """Independent chains in one program, which XLA may put on streams of their own."""
    inputs = chain_inputs()
    expected = [np.asarray(v) for v in jax.jit(chain)(*inputs)]
    both = jax.jit(lambda x, kernel, scale: (chain(x, kernel, scale), chain(x, kernel, jnp.abs(scale))))
    for outputs in both(*inputs):
        assert_all_bitwise(outputs, expected, "chain")
