"""The CUDA kernels that compute what they quantize, run on the host, within the bounds that the oracle derives.

The emulated exponential and reciprocal are off by as much as NVIDIA's manual allows, so that a bound that is too small
shows.
"""

import numpy as np
import oracle
import pytest

from . import emulated

FORMATS = tuple(oracle.FORMATS.values())
DTYPES = (oracle.BF16, oracle.F16, np.dtype(np.float32))
DTYPE_IDS = ("bf16", "f16", "f32")
HOPPER = 232448  # bytes of shared memory


def random_values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-6, 4, shape)).astype(np.float32).astype(dtype)


def check_activation(got, x, name, scale, fmt, **options):
    data, data_t, top = got
    scale = np.broadcast_to(np.float32(scale), x.shape[:1])
    for i, s in enumerate(scale):
        values = oracle.activation(x[i] if name.endswith("_gated") else x[i, :, 0], name)
        values.check(data[i], None if data_t is None else data_t[i], top[i], s, fmt, what=f"{name}, {i}", **options)


def activation_inputs(name, g, m, n, dtype, seed=0):
    return random_values((g, m, 2 if name.endswith("_gated") else 1, n), dtype, seed)


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", emulated.ACTIVATIONS)
def test_activations(emulated_library, name, dtype, fmt):
    """Whole tiles, edges, vectors, elements; one scale and one for each group."""
    for g, m, n in ((1, 128, 128), (2, 33, 72), (3, 5, 41)):
        x = activation_inputs(name, g, m, n, dtype, m)
        scale = np.float32([3.3, 0.1, 40])[:g]
        for shift in (0, dtype.itemsize):
            got = emulated_library.quantize_activation(x, scale, fmt, name, shift=shift)
            check_activation(got, x, name, scale, fmt)
        alone = emulated_library.quantize_activation(x, scale, fmt, name, transpose=False)
        assert alone[1] is None
        oracle.assert_bitwise(alone[0], got[0], "data without data_t")
        oracle.assert_bitwise(alone[2], got[2], "amax without data_t")


@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_activation_of_every_half(emulated_library, name, dtype):
    x = oracle.all_half_codes(dtype).reshape(1, 512, 1, 128)
    for scale in np.float32([1, 2.0**-8, 2.0**60]):
        got = emulated_library.quantize_activation(x, scale, oracle.E5M2, name)
        check_activation(got, x, name, scale, oracle.E5M2)


@pytest.mark.parametrize("name", emulated.ACTIVATIONS)
def test_activation_of_corner_cases(emulated_library, name):
    values = oracle.f32_corner_cases(3)[:8192]
    x = np.stack([values, np.random.default_rng(4).permutation(values)], -1) if name.endswith("_gated") else values
    x = np.moveaxis(x.reshape(1, 64, 128, -1), 3, 2)
    check_activation(emulated_library.quantize_activation(x, 1, oracle.E4M3, name), x, name, 1, oracle.E4M3)


@pytest.mark.parametrize("g, m, n", [(1, 1, 1), (1, 9, 1), (2, 130, 264), (1, 16, 1000), (40, 3, 5), (1, 400, 16)])
@pytest.mark.parametrize("name", ["silu", "silu_gated"])
def test_activation_shapes(kernels, g, m, n, name):
    """Grids that loop; data_t aligned and not."""
    x = activation_inputs(name, g, m, n, oracle.BF16, m * n)
    for shift, data_t_shift in ((0, 0), (2, 1), (0, 1)):
        got = kernels.quantize_activation(x, 3, oracle.E4M3, name, shift=shift, data_t_shift=data_t_shift)
        check_activation(got, x, name, 3, oracle.E4M3)


def norm_inputs(g, m, n, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((g, m, n)) + rng.uniform(-3, 3, (g, m, 1))) * 2.0 ** rng.uniform(-4, 4, (g, m, 1))
    return x.astype(np.float32).astype(dtype)


def check_norm(got, x, gamma, beta, kind, scale, fmt, **options):
    data, data_t, top = got
    scale = np.broadcast_to(np.float32(scale), x.shape[:1])
    # Four accumulators a lane, 32 lanes, and a tree; elements too. 12 for the last rounds of a row that is not a
    # multiple of what a warp takes at once.
    depth = x.shape[-1] // 128 + 12
    for i, s in enumerate(scale):
        j = i % gamma.shape[0]
        values = oracle.norm(x[i], gamma[j], None if beta is None else beta[j], kind, 1e-6, depth)
        values.check(data[i], None if data_t is None else data_t[i], top[i], s, fmt, what=f"{kind}, {i}", **options)


@pytest.fixture(params=[HOPPER, 2048], ids=["shared", "twice"])
def anywhere(emulated_library, request):
    """Rows kept in shared memory, and rows for which there is no room."""
    emulated_library.set_shared(request.param)
    yield emulated_library
    emulated_library.set_shared()


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("kind, has_beta", [("rms", False), ("layer", False), ("layer", True)])
def test_norms(anywhere, kind, has_beta, dtype, fmt):
    for g, m, n in ((1, 32, 128), (2, 33, 72), (3, 5, 41)):
        x, scale = norm_inputs(g, m, n, dtype, m), np.float32([30, 10, 3])[:g]
        gamma, beta = np.random.default_rng(n).standard_normal((2, g, n)).astype(np.float32)
        beta = beta if has_beta else None
        for shift in (0, dtype.itemsize):
            got = anywhere.quantize_norm(x, gamma, beta, scale, fmt, kind, 1e-6, shift=shift)
            check_norm(got, x, gamma, beta, kind, scale, fmt)
        alone = anywhere.quantize_norm(x, gamma, beta, scale, fmt, kind, 1e-6, shift=shift, transpose=False)
        assert alone[1] is None
        oracle.assert_bitwise(alone[0], got[0], "data without data_t")
        oracle.assert_bitwise(alone[2], got[2], "amax without data_t")


# A warp takes 256 vectors of a row at once (2048 elements of bf16), then 32.
@pytest.mark.parametrize("g, m, n", [(1, 1, 1), (1, 1, 8), (1, 17, 2048), (1, 16, 2056), (2, 3, 4352), (9, 40, 16)])
def test_norm_shapes(kernels, g, m, n):
    x = norm_inputs(g, m, n, oracle.BF16, n)
    gamma, beta = np.random.default_rng(n).standard_normal((2, 1, n)).astype(np.float32)
    for shift, data_t_shift in ((0, 0), (0, 1)) if m * n > 5000 else ((0, 0), (2, 1), (0, 1)):
        got = kernels.quantize_norm(
            x, gamma, beta, 30, oracle.E5M2, "layer", 1e-6, shift=shift, data_t_shift=data_t_shift
        )
        check_norm(got, x, gamma, beta, "layer", 30, oracle.E5M2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_of_bad_values(anywhere, kind, bad):
    x = norm_inputs(1, 20, 64, np.float32)
    x[0, 18, 7] = bad
    gamma = np.ones((1, 64), np.float32)
    data, _, top = anywhere.quantize_norm(x, gamma, None, 30, oracle.E4M3, kind, 1e-6)
    codes = oracle.widen(data)[0]
    rest = np.delete(codes[18], 7)
    assert np.isnan(codes[18, 7]) and np.isposinf(top[0])
    assert (rest == 0).all() if kind == "rms" and np.isinf(bad) else np.isnan(rest).all()
    assert not np.isnan(np.delete(codes, 18, 0)).any()


@pytest.mark.parametrize("start", [np.float32([0.5, 1e6]), np.float32([0, np.inf])], ids=str)
def test_amax_starts_from_what_is_given(emulated_library, start):
    """In a buffer of its own; the other tests start in place."""
    x = activation_inputs("gelu", 2, 5, 8, oracle.BF16)
    got = emulated_library.quantize_activation(x, 1, oracle.E4M3, "gelu", so_far=start, in_place=False)
    plain = emulated_library.quantize_activation(x, 1, oracle.E4M3, "gelu")
    oracle.assert_bitwise(got[2], np.maximum(plain[2], start), "activation")
    gamma = np.ones((1, 8), np.float32)
    got, plain = (
        emulated_library.quantize_norm(x[:, :, 0], gamma, None, 1, oracle.E4M3, "rms", 1e-6, **options)
        for options in ({"so_far": start, "in_place": False}, {})
    )
    oracle.assert_bitwise(got[2], np.maximum(plain[2], start), "norm")


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_no_elements(emulated_library, shape):
    """Nothing is launched, and the amax is what it starts from."""
    start = np.full(shape[0], 5, np.float32)
    x = np.zeros(shape, oracle.BF16)
    *_, top = emulated_library.quantize_activation(x[:, :, None], 1, oracle.E4M3, "gelu", so_far=start)
    oracle.assert_bitwise(top, start, "activation")
    gamma = np.ones((1, shape[2]), np.float32)
    *_, top = emulated_library.quantize_norm(x, gamma, None, 1, oracle.E4M3, "rms", 1e-6, so_far=start)
    oracle.assert_bitwise(top, start, "norm")
