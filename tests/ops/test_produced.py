"""quantize_activation and quantize_norm: codes and amax of f32 values within a derived bound of the oracle; `activate`
and `normalize`, their twins of the gradient path."""

import re

import jax
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

ACTIVATIONS = ("gelu", "silu", "relu", "silu_gated", "gelu_gated")
NORMS = {"rms": ("rms", False), "layer": ("layer", False), "layer with beta": ("layer", True)}  # kind, has a beta
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
SCALE, EPSILON, E4M3 = np.float32(3.3), 1e-6, oracle.E4M3.dtype


def parameters(name, n, dtype=np.float32, seed=0):
    """gamma and beta of a norm; nothing of an activation."""
    if name in ACTIVATIONS:
        return ()
    rng = np.random.default_rng(seed)
    gamma, beta = (1 + 0.3 * rng.standard_normal(n)).astype(dtype), rng.standard_normal(n).astype(dtype)
    return gamma, beta if NORMS[name][1] else None


def inputs(name, shape, dtype, seed=0):
    """For norms rows of very different magnitudes, with means that are not small."""
    if name in ACTIVATIONS:
        pair = (2,) * name.endswith("_gated")
        return cases.random_values((*shape[:-1], *pair, shape[-1]), dtype, seed, 1.0)
    rng = np.random.default_rng(seed)
    rows = 2.0 ** rng.uniform(-4, 4, (*shape[:-1], 1))
    return (rows * (rng.standard_normal(shape) + rng.uniform(-3, 3, rows.shape))).astype(np.float32).astype(dtype)


def run(name, x, *params, scale=SCALE, dtype=E4M3, epsilon=EPSILON, **options):
    if name in ACTIVATIONS:
        return ops.quantize_activation(x, scale, dtype, activation=name, **options)
    return ops.quantize_norm(x, *params, scale, dtype, kind=NORMS[name][0], epsilon=epsilon, **options)


def values(name, x, *params, epsilon=EPSILON):
    return oracle.activation(x, name) if name in ACTIVATIONS else oracle.norm(x, *params, NORMS[name][0], epsilon)


def check(got, name, x, *params, scale=SCALE, fmt=oracle.E4M3, epsilon=EPSILON, **options):
    data, data_t, top = (None if out is None else np.asarray(out) for out in got)
    values(name, x, *params, epsilon=epsilon).check(data, data_t, top, scale, fmt, **options)


@pytest.mark.varied
@pytest.mark.parametrize("name", [*ACTIVATIONS, *NORMS])
@DTYPES
@pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
def test_values(implementation, fmt, dtype, name):
    """On a GPU long rows too, which do not fit into shared memory."""
    long = ((100, 4096), (33, 16384), (1, 5001)) if implementation == "cuda" else ()
    for shape in ((64, 128), (217, 41), (3, 1), (33, 257), (5, 1000), *long):
        x, params = inputs(name, shape, dtype, shape[0]), parameters(name, shape[1], dtype)
        check(run(name, x, *params, dtype=fmt.dtype), name, x, *params, fmt=fmt, what=f"{name} of {shape}")


@pytest.mark.varied
@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_activation_of_every_half_code(implementation, dtype, name):
    """Tails, overflows, infinities and NaNs; a scale for which the tail is in range of the codes."""
    x = oracle.all_half_codes(dtype).reshape(256, 256)
    for scale in np.float32([1, 2.0**-8, 2.0**60]):
        got = run(name, x, scale=scale, dtype=oracle.E5M2.dtype)
        check(got, name, x, scale=scale, fmt=oracle.E5M2, what=f"{name} at scale {scale}")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_corner_cases(implementation, name):
    """f32 of every magnitude; gated, against every kind of factor."""
    x = oracle.f32_corner_cases(3)[:4096].reshape(16, -1)
    if name.endswith("_gated"):
        x = np.stack([x, np.random.default_rng(4).permutation(x.ravel()).reshape(x.shape)], axis=1)
    got = run(name, x, scale=np.float32(1))
    check(got, name, x, scale=np.float32(1))
    assert np.isposinf(got[2])


# x and what both silu and gelu give; then gates and factors whose product is not finite.
EDGES = [(np.nan, np.nan), (np.inf, np.inf), (-np.inf, np.nan), (-1000, -0.0), (0, 0), (-0.0, -0.0), (1000, 1000)]
GATED_EDGES = [(0, np.inf), (-1000, np.inf), (np.inf, 0), (-np.inf, 1), (1, np.nan), (1000, np.inf)]


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_edges(implementation, name):
    """What is said of infinities: NaN and infinities are the NaN code, and show in the amax."""
    for value, expected in EDGES:
        data, _, top = run(name, np.float32([[value, 0]]), scale=np.float32(1))
        expected_code = np.clip(expected, -448, 448) if np.isfinite(expected) else np.nan
        np.testing.assert_array_equal(oracle.widen(data)[0, 0], expected_code, err_msg=f"{name}({value})")
        np.testing.assert_allclose(top, abs(expected) if np.isfinite(expected) else np.inf, rtol=2.0**-20)
    for gate, up in GATED_EDGES:
        data, _, top = run(f"{name}_gated", np.float32([[[gate, 1], [up, 1]]]), scale=np.float32(1))
        assert np.isnan(oracle.widen(data)[0, 0]) and np.isposinf(top), f"{name}({gate}) * {up}"


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_epsilon(implementation, name):
    """Large beside the variance; zero; a row of zeros and a constant row need it."""
    x = inputs(name, (6, 64), np.float32)
    x = np.concatenate([x, np.zeros((1, 64), np.float32), np.full((1, 64), 5, np.float32)])
    params = np.ones(64, np.float32), None
    for epsilon in (1e-6, 3.0):
        got = run(name, x, *params, epsilon=epsilon)
        check(got, name, x, *params, epsilon=epsilon, what=f"epsilon {epsilon}")
    got = run(name, x, *params, epsilon=0)
    assert np.isnan(oracle.widen(got[0])[6]).all() and np.isposinf(got[2])  # 0 / 0


def test_a_large_mean(implementation):
    """Variance by E[x^2] - E[x]^2 would lose all of it: 2^14 squared is 2^28, of which f32 keeps multiples of 16."""
    x = (2.0**14 + np.random.default_rng(1).integers(-3, 4, (8, 256))).astype(np.float32)
    params = parameters("layer", 256)
    # Sums of 256 integers below 2^15 are exact in f32 in any order, and so is the mean: nothing but roundings of the
    # distances and later is left, as for n = 8.
    exact = oracle.norm(x, *params, "layer", EPSILON, depth=8).exact
    tight = oracle.Values(exact, np.abs(exact) * 2.0**-8)
    tight.check(*map(np.asarray, run("layer", x, *params)), SCALE, oracle.E4M3)


@pytest.mark.parametrize("name", ["rms", "layer"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_their_row(implementation, name, bad):
    """An infinity leaves zeros beside it for "rms", as in Flax, and NaN for "layer"."""
    x, params = inputs(name, (5, 48), np.float32), parameters(name, 48)
    x[2, 7] = bad
    data, _, top = run(name, x, *params)
    codes = oracle.widen(data)
    rest = np.delete(codes[2], 7)
    assert np.isnan(codes[2, 7]) and np.isposinf(top)
    assert (rest == 0).all() if name == "rms" and np.isinf(bad) else np.isnan(rest).all()
    others = np.delete(x, 2, axis=0)
    top = np.abs(values(name, others, *params).exact).max()
    check((np.delete(np.asarray(data), 2, axis=0), None, top), name, others, *params)


@pytest.mark.varied
@pytest.mark.parametrize("name", ["gelu", "silu_gated", "rms", "layer with beta"])
def test_options(implementation, name):
    """Without the transpose; an amax to start from; rows of several dimensions and batches of matrices."""
    x, params = inputs(name, (2, 3, 5, 24), oracle.BF16), parameters(name, 24)
    flat = x.reshape(30, *x.shape[3:])
    data, data_t, top = run(name, flat, *params)
    cases.assert_bitwise(data_t, np.asarray(data).T, "data_t")
    for start in (0.25 * float(top), 4 * float(top), np.inf):
        alone = run(name, flat, *params, transpose=False, amax=np.float32([start]))
        assert alone[1] is None
        cases.assert_bitwise(alone[0], data, "data without data_t")
        cases.assert_bitwise(alone[2], np.maximum(np.float32(start), top), f"amax from {start}")
    for rows, shape in ((3, (24, 2, 3, 5)), (2, (2, 24, 3, 5)), (1, (2, 3, 24, 5))):
        got = run(name, x, *params, rows=rows)
        assert got[1].shape == shape
        cases.assert_bitwise(got[0].reshape(30, 24), data, "data")
        cases.assert_bitwise(np.moveaxis(np.asarray(got[1]), 3 - rows, -1).reshape(30, 24), data, f"rows={rows}")
        cases.assert_bitwise(got[2], top, "amax")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("name", ["gelu_gated", "layer with beta"])
def test_no_elements(implementation, name, shape):
    x = np.zeros((shape[0], 2, shape[1]) if name == "gelu_gated" else shape, oracle.BF16)
    data, data_t, top = run(name, x, *parameters(name, shape[1]))
    assert (data.shape, data_t.shape, float(top)) == (shape, shape[::-1], 0)


def unit(dtype):
    return {2: 2.0**-8 if dtype == oracle.BF16 else 2.0**-11, 4: 2.0**-24}[dtype.itemsize]


@pytest.mark.parametrize("name", [*ACTIVATIONS, *NORMS])
@DTYPES
def test_activate_and_normalize(dtype, name):
    """Within the same bound, and one rounding to x's dtype; gradients are in `fused/`."""
    x, params = inputs(name, (40, 60), dtype, 6), parameters(name, 60)
    is_activation = name in ACTIVATIONS
    got = ops.activate(x, name) if is_activation else ops.normalize(x, *params, NORMS[name][0], EPSILON)
    exact = values(name, x, *params)
    assert got.dtype == dtype
    with np.errstate(over="ignore"):
        error = np.abs(np.asarray(got).astype(np.float64) - exact.exact)
    bound = exact.bound + unit(dtype) * np.abs(exact.exact) + 2.0**-25
    assert (error <= bound)[np.isfinite(np.asarray(got))].all()


@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
def test_slopes_far_from_zero(name):
    """No NaN where exp(-x) overflows."""
    slopes = jax.grad(lambda x: ops.activate(x, name).sum())(np.float32([-1e4, -200, -90, 90, 200, 1e4]))
    np.testing.assert_allclose(slopes, [0, 0, 0, 1, 1, 1], atol=1e-30)


@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize("name, op", [("silu_gated", "activation"), ("layer with beta", "norm")])
def test_what_it_lowers_to(name, op, transpose, cuda_custom_calls):
    """For CUDA one custom call; what else touches a tensor are the sums of a norm's rows. On a CPU jnp, then one."""
    x, params = inputs(name, (4, 8, 16), oracle.BF16), parameters(name, 16)
    lower = jax.jit(lambda x, amax: run(name, x, *params, transpose=transpose, amax=amax, rows=2)).trace(x, SCALE).lower
    text = lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == [f"jaxfp8_quantize_{op}_v2"]
    assert "operand_tuple_indices" in text  # the amax is raised in place
    # Of x, and of the squares of what is centered.
    assert len(re.findall(r"stablehlo\.reduce", text)) == (2 if op == "norm" else 0)
    assert not re.search(r"stablehlo\.(transpose|maximum|logistic)", text)
    calls = re.findall(r"custom_call @(jaxfp8_\w+?)_v\d", lower(lowering_platforms=("cpu",)).as_text())
    assert calls == ["jaxfp8_quantize" + "_transpose" * transpose]
