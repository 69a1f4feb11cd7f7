"""quantize_norm: codes and amax of f32 values within the derived bound of the oracle's; `normalize` beside Flax."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

FORMATS = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
# kind, whether with a beta
KINDS = pytest.mark.parametrize("kind, has_beta", [("rms", False), ("layer", False), ("layer", True)])
SCALE = np.float32(30)
EPSILON = 1e-6


def parameters(n, has_beta, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    gamma = (1 + 0.3 * rng.standard_normal(n)).astype(dtype)
    return gamma, rng.standard_normal(n).astype(dtype) if has_beta else None


def inputs(shape, dtype, seed=0):
    """Rows of very different magnitudes, with means that are not small."""
    rng = np.random.default_rng(seed)
    rows = 2.0 ** rng.uniform(-4, 4, (*shape[:-1], 1))
    return (rows * (rng.standard_normal(shape) + rng.uniform(-3, 3, rows.shape))).astype(np.float32).astype(dtype)


def check(got, x, gamma, beta, kind, fmt, scale=SCALE, epsilon=EPSILON, **options):
    data, data_t, top = (None if out is None else np.asarray(out) for out in got)
    oracle.norm(x, gamma, beta, kind, epsilon).check(data, data_t, top, scale, fmt, **options)


@pytest.mark.varied
@KINDS
@DTYPES
@FORMATS
def test_values(implementation, fmt, dtype, kind, has_beta):
    for shape in ((64, 128), (17, 41), (3, 1), (5, 1000)):
        x, (gamma, beta) = inputs(shape, dtype, shape[0]), parameters(shape[1], has_beta, dtype)
        got = ops.quantize_norm(x, gamma, beta, SCALE, fmt.dtype, kind=kind, epsilon=EPSILON)
        check(got, x, gamma, beta, kind, fmt, what=f"{kind} of {shape}")


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_epsilon(implementation, kind):
    """Large beside the variance; zero; a row of zeros and a constant row need it."""
    x = np.concatenate([inputs((6, 64), np.float32), np.zeros((1, 64), np.float32), np.full((1, 64), 5, np.float32)])
    gamma, _ = parameters(64, False)
    for epsilon in (1e-6, 3.0):
        got = ops.quantize_norm(x, gamma, None, SCALE, oracle.E4M3.dtype, kind=kind, epsilon=epsilon)
        check(got, x, gamma, None, kind, oracle.E4M3, epsilon=epsilon, what=f"epsilon {epsilon}")
    got = ops.quantize_norm(x, gamma, None, SCALE, oracle.E4M3.dtype, kind=kind, epsilon=0)
    assert np.isnan(oracle.widen(got[0])[6]).all() and np.isposinf(got[2])  # 0 / 0


def test_a_large_mean(implementation):
    """Variance by E[x^2] - E[x]^2 would lose all of it: 2^14 squared is 2^28, of which f32 keeps multiples of 16."""
    x = (2.0**14 + np.random.default_rng(1).integers(-3, 4, (8, 256))).astype(np.float32)
    gamma, _ = parameters(256, False)
    got = ops.quantize_norm(x, gamma, None, SCALE, oracle.E4M3.dtype, kind="layer", epsilon=EPSILON)
    # Sums of 256 integers below 2^15 are exact in f32 in any order, and so is the mean: nothing but roundings of the
    # distances and later is left, as for n = 8.
    values = oracle.norm(x, gamma, None, "layer", EPSILON, depth=8)
    tight = oracle.Values(values.exact, np.abs(values.exact) * 2.0**-8)
    tight.check(*map(np.asarray, got), SCALE, oracle.E4M3)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values(implementation, kind, bad):
    """They stay in their row. An infinity leaves zeros beside it for "rms", as in Flax, and NaN for "layer"."""
    x = inputs((5, 48), np.float32)
    x[2, 7] = bad
    gamma, _ = parameters(48, False)
    data, _, top = ops.quantize_norm(x, gamma, None, SCALE, oracle.E4M3.dtype, kind=kind, epsilon=EPSILON)
    codes = oracle.widen(data)
    rest = np.delete(codes[2], 7)
    assert np.isnan(codes[2, 7]) and np.isposinf(top)
    assert (rest == 0).all() if kind == "rms" and np.isinf(bad) else np.isnan(rest).all()
    x[2] = 0
    for row in (0, 1, 3, 4):
        values = oracle.norm(x[row], gamma, None, kind, EPSILON)
        good = oracle.Values(values.exact, values.bound)
        good.check(np.asarray(data)[row], None, np.abs(values.exact).max(), SCALE, oracle.E4M3, what=f"row {row}")


def run(x, gamma, beta, scale, kind="layer", **options):
    return ops.quantize_norm(x, gamma, beta, scale, oracle.E4M3.dtype, kind=kind, epsilon=EPSILON, **options)


def test_options(implementation):
    """Without the transpose; an amax to start from; rows of several dimensions and batches of matrices."""
    x, (gamma, beta) = inputs((2, 3, 5, 24), oracle.BF16), parameters(24, True)
    data, data_t, top = run(x.reshape(30, 24), gamma, beta, SCALE)
    alone = run(x.reshape(30, 24), gamma, beta, SCALE, transpose=False, amax=np.float32([100]))
    assert alone[1] is None
    cases.assert_bitwise(alone[0], data, "data")
    cases.assert_bitwise(alone[2], np.float32(100), "amax from 100")
    cases.assert_bitwise(run(x.reshape(30, 24), gamma, beta, SCALE, amax=np.float32(0.01))[2], top, "amax from 0.01")
    cases.assert_bitwise(data_t, np.asarray(data).T, "data_t")
    for rows, shape in ((3, (24, 2, 3, 5)), (2, (2, 24, 3, 5)), (1, (2, 3, 24, 5))):
        got = run(x, gamma, beta, SCALE, rows=rows)
        assert got[1].shape == shape
        cases.assert_bitwise(got[0].reshape(30, 24), data, "data")
        cases.assert_bitwise(np.moveaxis(np.asarray(got[1]), 3 - rows, -1).reshape(30, 24), data, f"rows={rows}")
        cases.assert_bitwise(got[2], top, "amax")


def test_vmap(implementation):
    """Members with scales, gammas and amaxes of their own; with shared ones."""
    x, scales = inputs((3, 4, 10, 24), oracle.BF16), np.float32([10, 20, 30])
    pairs = [parameters(24, True, seed=i) for i in range(3)]
    gammas, betas = (np.stack(p) for p in zip(*pairs, strict=True))
    own = jax.vmap(run)(x, gammas, betas, scales)
    shared = jax.vmap(run, in_axes=(0, None, None, None))(x, *pairs[0], scales[0])
    for i in range(3):
        for out, (gamma, beta), scale in ((own, pairs[i], scales[i]), (shared, pairs[0], scales[0])):
            values = oracle.norm(x[i], gamma, beta, "layer", EPSILON)
            data, data_t, top = (np.asarray(part)[i] for part in out)
            values.check(data, None, top, scale, oracle.E4M3, what=f"member {i}")
            cases.assert_bitwise(data_t, data.swapaxes(-1, -2), "data_t")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_no_elements(implementation, shape):
    gamma, beta = parameters(shape[1], True)
    data, data_t, top = run(np.zeros(shape, oracle.BF16), gamma, beta, SCALE)
    assert (data.shape, data_t.shape, float(top)) == (shape, shape[::-1], 0)


@KINDS
@DTYPES
def test_normalize(dtype, kind, has_beta):
    """The twin of the gradient path: the values of Flax's layers, and their derivatives."""
    x, (gamma, beta) = inputs((6, 96), dtype), parameters(96, has_beta)
    values = oracle.norm(x, gamma, beta, kind, EPSILON)
    got = np.asarray(ops.normalize(x, gamma, beta, kind, EPSILON))
    assert got.dtype == dtype
    unit = {2: 2.0**-8 if dtype == oracle.BF16 else 2.0**-11, 4: 2.0**-24}[dtype.itemsize]
    error = np.abs(got.astype(np.float64) - values.exact)
    assert (error <= values.bound + unit * np.abs(values.exact) + 2.0**-25).all()
    if kind == "rms":
        layer = nn.RMSNorm(epsilon=EPSILON)
    else:
        layer = nn.LayerNorm(epsilon=EPSILON, use_bias=has_beta, use_fast_variance=False)
    x = x.astype(np.float32)

    def loss(function):
        return lambda *arguments: (function(*arguments) * np.cos(np.arange(96, dtype=np.float32))[None]).sum()

    def flax(x, gamma, beta):
        return layer.apply({"params": {"scale": gamma} | ({} if beta is None else {"bias": beta})}, x)

    wanted = (0, 1, 2) if has_beta else (0, 1)
    ours = jax.grad(loss(lambda x, gamma, beta: ops.normalize(x, gamma, beta, kind, EPSILON)), wanted)(x, gamma, beta)
    theirs = jax.grad(loss(flax), wanted)(x, gamma, beta)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())  # sums over 96, twice


@pytest.mark.parametrize("transpose", [True, False])
def test_what_it_lowers_to(transpose, cuda_custom_calls):
    """For CUDA one custom call; what else touches a tensor are the sums of its rows."""
    arguments = jnp.ones((4, 8, 16), jnp.bfloat16), jnp.ones(16), jnp.ones(16), SCALE, SCALE

    def of_rows(x, gamma, beta, scale, amax):
        return run(x, gamma, beta, scale, transpose=transpose, amax=amax, rows=2)

    text = jax.jit(of_rows).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["jaxfp8_quantize_norm_v2"]
    assert "operand_tuple_indices" in text  # the amax is raised in place
    assert len(re.findall(r"stablehlo\.reduce", text)) == 2  # of x, and of the squares of what is centered
    assert not re.search(r"stablehlo\.(transpose|maximum)", text)


BAD = {
    "kind": ({"kind": "batch"}, ValueError),
    "x": ({"x": np.ones(6, np.float32)}, ValueError),
    "x: integers": ({"x": np.ones((4, 6), np.int32)}, TypeError),
    "x: rows": ({"rows": 2}, ValueError),
    "gamma": ({"gamma": np.ones(5, np.float32)}, ValueError),
    "gamma: f64": ({"gamma": np.ones(6)}, TypeError),
    "gamma: None": ({"gamma": None}, TypeError),
    "beta": ({"beta": np.ones((1, 6), np.float32)}, ValueError),
    "beta: of rms": ({"kind": "rms", "beta": np.ones(6, np.float32)}, ValueError),
    "epsilon": ({"epsilon": -1.0}, ValueError),
    "epsilon: NaN": ({"epsilon": np.nan}, ValueError),
    "epsilon: inf": ({"epsilon": np.inf}, ValueError),
    "scale": ({"scale": np.ones(2, np.float32)}, ValueError),
    "dtype": ({"dtype": np.float32}, TypeError),
    "amax": ({"amax": np.ones(2, np.float32)}, ValueError),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(case):
    change, exception = BAD[case]
    arguments = {"x": np.ones((4, 6), np.float32), "gamma": np.ones(6, np.float32), "beta": None, "scale": SCALE}
    arguments |= {"dtype": oracle.E4M3.dtype, "kind": "layer", "epsilon": 1.0}
    assert ops.quantize_norm(**arguments)[0].shape == (4, 6)
    with pytest.raises(exception, match=rf"quantize_norm: {case.split(':')[0]}\b"):
        ops.quantize_norm(**arguments | change)


def test_is_not_differentiable():
    with pytest.raises(TypeError, match="quantize_norm is not differentiable"):
        jax.grad(lambda x: run(x, jnp.ones(6), None, SCALE)[2])(jnp.ones((4, 6)))
