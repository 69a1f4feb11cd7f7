"""quantize_activation_grad: codes, amax and sums of the gradient of an activation within a derived bound of the oracle;
the reference to the bit of what JAX differentiates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_gradients
import pytest

from jaxfp8 import ops

from . import cases

ACTIVATIONS = ("gelu", "silu", "relu", "silu_gated", "gelu_gated")
NAMES = pytest.mark.parametrize("name", ACTIVATIONS)
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
SCALE, E5M2 = np.float32(3.3), oracle.E5M2


def inputs(name, shape, dtype, seed=0):
    """x and the gradient of its activation."""
    x = cases.random_values((*shape[:-1], *(2,) * name.endswith("_gated"), shape[-1]), dtype, seed, 1.0)
    return x, cases.random_values(shape, dtype, seed + 1, 1.0)


def run(name, x, grad, scale=SCALE, dtype=E5M2.dtype, **options):
    return ops.quantize_activation_grad(x, grad, scale, dtype, activation=name, **options)


def flat(x, m):
    """As the matrix that is quantized; x has m rows, or m columns behind."""
    return np.asarray(x).reshape(m, -1)


def check(got, name, x, grad, scale=SCALE, fmt=E5M2, what=""):
    data, data_t, top, *sums = got
    m, values = len(x), oracle_gradients.activation(x, grad, name)
    assert data.shape == x.shape and (data_t is None or data_t.shape == (*x.shape[1:], m))
    values = oracle.Values(flat(values.exact, m), flat(values.bound, m))
    data_t = None if data_t is None else np.asarray(data_t).reshape(-1, m)
    values.check(flat(data, m), data_t, np.asarray(top), scale, fmt, what=f"{name}{what}")
    for total in sums:
        # m additions in any order, each off by u of what it adds up.
        size = np.abs(values.exact).sum(0)
        bound = values.bound.sum(0) + m * 2.0**-24 * (size + values.bound.sum(0))
        oracle.Product(values.exact.sum(0), bound).check(np.asarray(total).reshape(-1), f"{name}: sums")


@pytest.mark.varied
@NAMES
@DTYPES
@pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
def test_values(implementation, fmt, dtype, name):
    both, one = {"column_sums": True}, {"transpose": False}
    for shape, options in (((64, 128), {}), ((217, 41), both), ((3, 1), both), ((33, 257), one), ((130, 72), both)):
        x, grad = inputs(name, shape, dtype, shape[0])
        check(run(name, x, grad, dtype=fmt.dtype, **options), name, x, grad, fmt=fmt, what=f" of {shape}")


@pytest.mark.varied
@NAMES
@DTYPES
def test_every_magnitude_of_x(implementation, dtype, name):
    """Tails on both sides, where nothing may cancel: from 2^-40 to 2^40 a derivative is between -0.2 and 1.2."""
    rng, shape = np.random.default_rng(5), (64, *(2,) * name.endswith("_gated"), 128)
    powers = 2.0 ** rng.uniform(-40, 15 if dtype == oracle.F16 else 40, shape) * rng.choice([-1, 1], shape)
    x, grad = powers.astype(np.float32).astype(dtype), inputs(name, (64, 128), dtype)[1]
    with np.errstate(over="ignore"):
        check(run(name, x, grad, scale=np.float32(1)), name, x, grad, scale=np.float32(1))
    if not name.endswith("_gated"):
        ones = np.ones_like(grad)
        data, _, top = run(name, x, ones, scale=np.float32(1))
        assert 1 <= top < 1.2 and np.abs(oracle.widen(data)).max() <= 1.25


# x and the gradient, one element; what is not finite is a NaN code and an infinite amax.
BAD = [("silu", np.nan, 1), ("silu", 1, np.nan), ("gelu", 1, np.inf), ("relu", np.nan, np.nan)]
BAD += [("silu_gated", (np.nan, 1), 1), ("silu_gated", (1, np.inf), 1), ("gelu_gated", (1, 2), -np.inf)]


@pytest.mark.parametrize("name, x, grad", BAD)
@pytest.mark.parametrize("n", [8, 5, 256])
def test_bad_values_stay_where_they_are(implementation, name, x, grad, n):
    """In vectors, element by element, and in a whole tile."""
    pair = (2,) if name.endswith("_gated") else ()
    operand, ct = np.ones((128, *pair, n), np.float32), np.ones((128, n), np.float32)
    operand[17, ..., 3], ct[17, 3] = x, grad
    data, data_t, top = run(name, operand, ct, scale=np.float32(1))
    bad = np.isnan(oracle.widen(data))
    assert np.isposinf(top) and bad[17, ..., 3].any() and bad.sum() == bad[17, ..., 3].sum()
    cases.assert_bitwise(flat(data_t, pair[0] * n if pair else n), flat(data, 128).T.copy(), "data_t")


@pytest.mark.varied
@pytest.mark.parametrize("name", ["gelu", "silu_gated"])
def test_options(implementation, name):
    """An amax to start from, or none; rows of several dimensions and batches of matrices."""
    x, grad = inputs(name, (2, 3, 5, 24), oracle.BF16)
    rest = x.shape[3:]
    of_all = x.reshape(30, *rest), grad.reshape(30, 24)
    data, data_t, top, sums = run(name, *of_all, column_sums=True)
    for start in (0.25 * float(top), 4 * float(top), np.inf):
        got = run(name, *of_all, amax=np.float32([start]), transpose=False)
        cases.assert_bitwise(got[0], np.asarray(data), "data without data_t")
        cases.assert_bitwise(got[2], np.maximum(np.float32(start), top), f"amax from {start}")
    for rows, batch in ((3, ()), (2, (2,)), (1, (2, 3))):
        got = run(name, x, grad, rows=rows, column_sums=True)
        assert got[1].shape == (*batch, *rest, *x.shape[len(batch) : 3]) and got[3].shape == (*batch, *rest)
        cases.assert_bitwise(got[0].reshape(30, *rest), np.asarray(data), "data")
        back = np.moveaxis(np.asarray(got[1]).reshape(*batch, *rest, -1), -1, len(batch))
        cases.assert_bitwise(back.reshape(30, *rest), np.asarray(data), f"data_t, rows={rows}")
        total = np.asarray(got[3]).reshape(-1, *rest).sum(0)
        np.testing.assert_allclose(total, sums, rtol=1e-5, atol=30 * 2.0**-22 * np.abs(np.asarray(sums)).max())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_no_elements(implementation, shape):
    x, grad = np.zeros((shape[0], 2, shape[1]), np.float32), np.zeros(shape, np.float32)
    data, data_t, top, sums = run("silu_gated", x, grad, column_sums=True)
    assert (data.shape, data_t.shape, float(top)) == (x.shape, (2, *shape[::-1]), 0)
    assert sums.shape == x.shape[1:] and not np.any(sums)


@NAMES
@DTYPES
def test_the_reference_is_what_jax_differentiates(dtype, name):
    """In f32, without a rounding in between: every bit."""
    x, grad = inputs(name, (33, 40), dtype, 3)

    @jax.jit
    def expected(x, grad):
        wide, ct = x.astype(jnp.float32), grad.astype(jnp.float32)
        dx = jax.vjp(lambda x: ops.activate(x, name), wide)[1](ct)[0]
        return ops.quantize_transpose(dx, SCALE, E5M2.dtype, cols=x.ndim - 1)

    with ops.implementation("reference"):
        got = jax.jit(lambda x, grad: run(name, x, grad))(x, grad)
        for part, value, what in zip(got, expected(x, grad), ("data", "data_t", "amax"), strict=True):
            cases.assert_bitwise(part, np.asarray(value), what)


@pytest.mark.parametrize("options", [{}, {"transpose": False}, {"column_sums": True}], ids=str)
@pytest.mark.parametrize("name", ["gelu", "silu_gated"])
def test_what_it_lowers_to(name, options, cuda_custom_calls):
    """For CUDA one custom call, and the sum of the parts of sums; on a CPU jnp, then one."""
    x, grad = inputs(name, (4, 8, 16), oracle.BF16)
    lower = jax.jit(lambda x, grad, amax: run(name, x, grad, amax=amax, rows=2, **options)).trace(x, grad, SCALE).lower
    text = lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["jaxfp8_quantize_activation_grad_v1"]
    assert "operand_tuple_indices" in text  # the amax is raised in place
    assert len(re.findall(r"stablehlo\.reduce", text)) == len(options.keys() & {"column_sums"})
    assert not re.search(r"stablehlo\.(transpose|maximum|logistic)", text)
    calls = re.findall(r"custom_call @(jaxfp8_\w+?)_v\d", lower(lowering_platforms=("cpu",)).as_text())
    assert calls == ["jaxfp8_quantize" + "_transpose" * ("transpose" not in options)]
