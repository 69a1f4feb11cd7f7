"""The CUDA kernels that compute what they quantize, run on the host: norms bitwise, activations within derived bounds.

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


# Whether there are a mean and a beta.
NORMS = {"rms": (False, False), "layer": (True, False), "layer with beta": (True, True)}


def norm_inputs(name, g, m, n, dtype, own=True, seed=0):
    """x, statistics, gamma and beta; `own`: parameters of each group."""
    rng = np.random.default_rng(seed)
    has_mean, has_beta = NORMS[name]
    statistics = random_values((g, m, 1 + has_mean), np.float32, seed + 1)
    gamma, beta = rng.standard_normal((2, g if own else 1, n)).astype(np.float32)
    return random_values((g, m, n), dtype, seed), statistics, gamma, beta if has_beta else None


def check_norm(got, inputs, scale, fmt, what):
    """Bitwise: with the statistics given, every operation has one result."""
    x, statistics, gamma, beta = inputs
    scale = np.broadcast_to(np.float32(scale), x.shape[:1])
    for i, s in enumerate(scale):
        j = i % gamma.shape[0]
        values = oracle.affine(x[i], statistics[i], gamma[j], None if beta is None else beta[j])
        for result, expected in zip(got, oracle.quantize_transpose(values, s, fmt), strict=True):
            if result is not None:
                oracle.assert_bitwise(result[i], expected, f"{what}, group {i}")


@pytest.mark.parametrize("fmt", FORMATS, ids=oracle.FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("name", NORMS)
def test_norms(emulated_library, name, dtype, fmt):
    """Whole tiles, edges, vectors, elements; one scale and one for each group; parameters likewise."""
    for (g, m, n), own in (((1, 128, 256), False), ((2, 33, 72), True), ((3, 5, 41), True), ((2, 130, 136), False)):
        inputs = norm_inputs(name, g, m, n, dtype, own, m)
        scale = np.float32([30, 0.1, 3])[:g]
        for shift, parameter_shift in ((0, 0), (dtype.itemsize, 0), (0, 4)):
            options = {"shift": shift, "parameter_shift": parameter_shift}
            got = emulated_library.quantize_norm(*inputs, scale, fmt, **options)
            check_norm(got, inputs, scale, fmt, f"{name}, {options}")
        alone = emulated_library.quantize_norm(*inputs, scale, fmt, transpose=False)
        assert alone[1] is None
        check_norm(alone, inputs, scale, fmt, f"{name} without data_t")


@pytest.mark.parametrize("g, m, n", [(1, 1, 1), (1, 1, 8), (1, 17, 2048), (2, 3, 1000), (9, 40, 16), (1, 400, 136)])
def test_norm_shapes(kernels, g, m, n):
    """Grids that loop; data_t aligned and not."""
    inputs = norm_inputs("layer with beta", g, m, n, oracle.BF16, seed=n)
    for shift, data_t_shift in ((0, 0), (2, 1), (0, 1)):
        options = {"shift": shift, "data_t_shift": data_t_shift}
        check_norm(kernels.quantize_norm(*inputs, 30, oracle.E5M2, **options), inputs, 30, oracle.E5M2, str(options))


@pytest.mark.parametrize("m, n", [(3, 8), (3, 5), (130, 136), (130, 131)])
def test_nothing_outside_of_a_matrix_is_in_the_amax_of_a_norm(emulated_library, m, n):
    """Neither a beta, which here is what the values add up to 0 with, nor the statistics of the next group."""
    x, statistics = np.zeros((2, m, n), np.float32), np.empty((2, m, 2), np.float32)
    statistics[:] = np.float32([[[1, 2]], [[1, 0]]])
    gamma, beta = np.full((2, 1, n), 50, np.float32) * np.float32([[[1]], [[2]]])
    data, data_t, top = emulated_library.quantize_norm(x, statistics, gamma, beta, 1, oracle.E4M3)
    assert top.tolist() == [0, 100] and not oracle.bits(data)[0].any() and not oracle.bits(data_t)[0].any()


# The operand, and the element that is bad.
BAD_ELEMENTS = {
    "x": (0, (0, 18, 7)),
    "rstd": (1, (0, 18, 0)),
    "mean": (1, (0, 18, 1)),
    "gamma": (2, (0, 7)),
    "beta": (3, (0, 7)),
}


@pytest.mark.parametrize("where", BAD_ELEMENTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, np.finfo(np.float32).max])
@pytest.mark.parametrize("n", [128, 40])
def test_norm_of_bad_values(emulated_library, where, bad, n):
    """Codes of what is not finite, and of what is not any more, are NaN; in a whole tile, and at an edge."""
    inputs = norm_inputs("layer with beta", 1, 128, n, np.float32)
    operand, element = BAD_ELEMENTS[where]
    inputs[operand][element] = bad
    for fmt in FORMATS:
        got = emulated_library.quantize_norm(*inputs, 2.0**100, fmt)
        check_norm(got, inputs, 2.0**100, fmt, where)


def test_norm_of_zeros(emulated_library):
    """Their signs stay where nothing is added; +0 and -0 add up to +0."""
    x = np.resize(np.float32([0.0, -0.0]), (1, 16, 16))
    statistics, gamma = np.broadcast_to(np.float32([1, 0]), (1, 16, 2)), np.ones((1, 16), np.float32)
    for count, beta in ((1, None), (2, None), (2, np.float32([[0.0, -0.0] * 8]))):
        inputs = x, statistics[..., :count], gamma, beta
        check_norm(emulated_library.quantize_norm(*inputs, 1, oracle.E4M3), inputs, 1, oracle.E4M3, "zeros")


AMAXES = {
    "in place": ({"so_far": True}, (1, 0, 0)),
    "in a copy": ({"so_far": True, "in_place": False}, (1, 0, 1)),
    "from zero": ({}, (1, 1, 0)),
    "not wanted": ({"amax": False}, (1, 0, 0)),
}


@pytest.mark.parametrize("start", [np.float32([0.5, 1e6]), np.float32([0, np.inf])], ids=str)
@pytest.mark.parametrize("case", AMAXES)
def test_where_the_amax_starts(emulated_library, case, start):
    """And what is put on the stream before the kernel."""
    options, launches = AMAXES[case]
    options = options | {"so_far": start if "so_far" in options else None}
    x, inputs = activation_inputs("gelu", 2, 5, 8, oracle.BF16), norm_inputs("rms", 2, 5, 8, oracle.BF16)
    for op, arguments in (
        (emulated_library.quantize_activation, (x, 1, oracle.E4M3, "gelu")),
        (emulated_library.quantize_norm, (*inputs, 1, oracle.E4M3)),
    ):
        *codes, top = op(*arguments)
        emulated_library.launches()
        *got, found = op(*arguments, **options)
        assert emulated_library.launches() == launches
        for result, expected in zip(got, codes, strict=True):
            oracle.assert_bitwise(result, expected, case)
        if options.get("amax", True):
            oracle.assert_bitwise(found, top if options["so_far"] is None else np.maximum(top, start), case)
        else:
            assert found is None


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_no_elements(emulated_library, shape):
    """No kernel is launched, and the amax is what it starts from."""
    start = np.full(shape[0], 5, np.float32)
    x, inputs = activation_inputs("gelu", *shape, oracle.BF16), norm_inputs("layer", *shape, oracle.BF16)
    for so_far in (start, None):
        emulated_library.launches()
        *_, top = emulated_library.quantize_activation(x, 1, oracle.E4M3, "gelu", so_far=so_far)
        *_, of_norm = emulated_library.quantize_norm(*inputs, 1, oracle.E4M3, so_far=so_far)
        assert emulated_library.launches()[0] == 0
        for found in (top, of_norm):
            oracle.assert_bitwise(found, start * (so_far is not None), "amax")
