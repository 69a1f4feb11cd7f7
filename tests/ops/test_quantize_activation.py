"""quantize_activation: codes and amax of f32 values within a derived bound of the oracle; `activate` beside jax.nn."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxfp8 import ops

from . import cases

NAMES = ("gelu", "silu", "relu", "silu_gated", "gelu_gated")
FORMATS = pytest.mark.parametrize("fmt", cases.FORMATS, ids=cases.FORMAT_IDS)
DTYPES = pytest.mark.parametrize("dtype", cases.INPUT_DTYPES, ids=cases.DTYPE_IDS)
ACTIVATIONS = pytest.mark.parametrize("name", NAMES)
SCALE = np.float32(3.3)


def is_gated(name):
    return name.endswith("_gated")


def inputs(name, m, n, dtype, seed=0, spread=1.0):
    return cases.random_values((m, 2, n) if is_gated(name) else (m, n), dtype, seed, spread)


def check(got, x, name, scale, fmt, **options):
    data, data_t, top = (None if out is None else np.asarray(out) for out in got)
    oracle.activation(x, name).check(data, data_t, top, scale, fmt, **options)


@pytest.mark.varied
@ACTIVATIONS
@DTYPES
@FORMATS
def test_values(implementation, fmt, dtype, name):
    for shape in ((64, 128), (217, 41), (1, 9), (33, 257)):
        x = inputs(name, *shape, dtype, seed=shape[0])
        got = ops.quantize_activation(x, SCALE, fmt.dtype, activation=name)
        check(got, x, name, SCALE, fmt, what=f"{name} of {x.shape}")


@pytest.mark.varied
@pytest.mark.parametrize("name", ["gelu", "silu", "relu"])
@pytest.mark.parametrize("dtype", [oracle.BF16, oracle.F16], ids=["bf16", "f16"])
def test_every_half_code(implementation, dtype, name):
    """Tails, overflows, infinities and NaNs; a scale for which the tail is in range of the codes."""
    x = oracle.all_half_codes(dtype).reshape(256, 256)
    for scale in np.float32([1, 2.0**-8, 2.0**60]):
        got = ops.quantize_activation(x, scale, oracle.E5M2.dtype, activation=name)
        check(got, x, name, scale, oracle.E5M2, what=f"{name} at scale {scale}")


@ACTIVATIONS
def test_corner_cases(implementation, name):
    """f32 of every magnitude; gated, against every kind of factor."""
    x = oracle.f32_corner_cases(3)[:4096]
    if is_gated(name):
        x = np.stack([x, np.random.default_rng(4).permutation(x)])
    x = x.reshape(*x.shape[:-1], 16, -1).swapaxes(0, -2) if is_gated(name) else x.reshape(16, -1)
    got = ops.quantize_activation(x, np.float32(1), oracle.E4M3.dtype, activation=name)
    check(got, x, name, np.float32(1), oracle.E4M3)
    assert np.isposinf(got[2])


# x and what both silu and gelu give; then gates and factors whose product is not finite.
EDGES = [(np.nan, np.nan), (np.inf, np.inf), (-np.inf, np.nan), (-1000, -0.0), (0, 0), (-0.0, -0.0), (1000, 1000)]
GATED_EDGES = [(0, np.inf), (-1000, np.inf), (np.inf, 0), (-np.inf, 1), (1, np.nan), (1000, np.inf)]


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_edges(implementation, name):
    """What is said of infinities: NaN and infinities are the NaN code, and show in the amax."""
    for value, expected in EDGES:
        x = np.float32([[value, 0]])
        data, _, top = ops.quantize_activation(x, np.float32(1), oracle.E4M3.dtype, activation=name)
        got = oracle.widen(data)[0, 0]
        assert np.isnan(got) if not np.isfinite(expected) else got == np.clip(expected, -448, 448), f"{name}({value})"
        assert float(top) == (abs(expected) if np.isfinite(expected) else np.inf)
    for gate, up in GATED_EDGES:
        x = np.float32([[[gate, 1], [up, 1]]])
        data, _, top = ops.quantize_activation(x, np.float32(1), oracle.E4M3.dtype, activation=f"{name}_gated")
        assert np.isnan(oracle.widen(data)[0, 0]) and np.isposinf(top), f"{name}({gate}) * {up}"


@pytest.mark.varied
@ACTIVATIONS
def test_without_the_transpose(implementation, name):
    x = inputs(name, 66, 35, oracle.BF16, 1)
    data, data_t, top = ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation=name)
    alone = ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation=name, transpose=False)
    assert alone[1] is None
    cases.assert_bitwise(alone[0], data, "data")
    cases.assert_bitwise(alone[2], top, "amax")
    cases.assert_bitwise(data_t, np.asarray(data).T, "data_t")


@pytest.mark.parametrize("name", ["gelu", "silu_gated"])
def test_amax_starts_from_what_is_given(implementation, name):
    x = inputs(name, 20, 30, oracle.BF16, 2)
    top = ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation=name)[2]
    for start, expected in ((0.25 * float(top), top), (4 * float(top), np.float32(4 * float(top))), (np.inf, np.inf)):
        for amax in (np.float32(start), np.float32([start])):
            got = ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation=name, amax=amax)
            cases.assert_bitwise(got[2], np.float32(expected), f"amax from {start}")


@pytest.mark.varied
@ACTIVATIONS
def test_rows_and_batches(implementation, name):
    """`rows` dimensions make one matrix; what is before them are more of it, with one scale and one amax."""
    pair = (2,) if is_gated(name) else ()
    x = cases.random_values((2, 3, 5, *pair, 12), oracle.BF16, 3, 1)
    flat = x.reshape(30, *pair, 12)
    data, data_t, top = ops.quantize_activation(flat, SCALE, oracle.E4M3.dtype, activation=name)
    for rows, shape in ((3, (12, 2, 3, 5)), (2, (2, 12, 3, 5)), (1, (2, 3, 12, 5))):
        got = ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation=name, rows=rows)
        assert got[1].shape == shape
        cases.assert_bitwise(got[0].reshape(30, 12), data, "data")
        last = np.moveaxis(np.asarray(got[1]), 3 - rows, -1)
        cases.assert_bitwise(last.reshape(30, 12), data, f"data_t, rows={rows}")
        cases.assert_bitwise(got[2], top, "amax")


def test_vmap(implementation):
    """Members with their own amax, a scale of their own or a shared one; a matrix in no position in particular."""
    x = cases.random_values((4, 10, 2, 3, 24), oracle.BF16, 5, 1)  # members in dimensions 0 and 3
    scales, starts = np.float32([1, 2, 3]), np.float32([0, 1e6, 0])

    def one(x, scale, start):
        return ops.quantize_activation(x, scale, oracle.E4M3.dtype, activation="silu_gated", amax=start)

    own = jax.vmap(jax.vmap(one, in_axes=(2, 0, 0)), in_axes=(0, None, None))(x, scales, starts)
    shared = jax.vmap(lambda x: one(x, scales[0], starts[0]), in_axes=2)(x[0])
    for j in range(3):
        for i in range(4):
            got = [out[i, j] for out in own]
            check(got, x[i, :, :, j], "silu_gated", scales[j], oracle.E4M3, start=starts[j], what=f"member {i}, {j}")
        check([out[j] for out in shared], x[0, :, :, j], "silu_gated", scales[0], oracle.E4M3, what=f"member {j}")


@pytest.mark.parametrize("shape", [(0, 2, 5), (5, 2, 0), (0, 2, 0)])
def test_no_elements(implementation, shape):
    x = np.zeros(shape, oracle.BF16)
    data, data_t, top = ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation="gelu_gated")
    assert (data.shape, data_t.shape) == (shape[::2], shape[::-2])
    assert float(top) == 0


@ACTIVATIONS
@DTYPES
def test_activate(dtype, name):
    """The twin of the gradient path: within the same bound, and one rounding to x's dtype; jax.nn's derivative."""
    x = inputs(name, 40, 60, dtype, 6, spread=1.0)
    values = oracle.activation(x, name)
    got = np.asarray(ops.activate(x, name))
    assert got.dtype == dtype
    unit = {2: 2.0**-8 if dtype == oracle.BF16 else 2.0**-11, 4: 2.0**-24}[dtype.itemsize]
    with np.errstate(over="ignore"):
        error = np.abs(got.astype(np.float64) - values.exact)
    assert (error <= values.bound + unit * np.abs(values.exact) + 2.0**-25)[np.isfinite(got)].all()

    def reference(x):
        function = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu}[name.removesuffix("_gated")]
        return function(x[..., 0, :]) * x[..., 1, :] if is_gated(name) else function(x)

    x = np.float32(np.clip(x.astype(np.float32), -20, 20))
    x.flat[0] = 0
    ours, theirs = (jax.grad(lambda x, f=f: f(x).sum())(x) for f in (lambda x: ops.activate(x, name), reference))
    # Derivatives are of order 1 times a factor of at most 20; jax.nn.gelu cancels to 2^-24 of 1.
    np.testing.assert_allclose(ours, theirs, rtol=2.0**-18, atol=20 * 2.0**-20)


def test_derivative_far_out():
    """No NaN where exp(-x) overflows."""
    x = np.float32([-1e4, -200, -90, 90, 200, 1e4])
    for name in ("gelu", "silu"):
        slopes = jax.grad(lambda x, name=name: ops.activate(x, name).sum())(x)
        np.testing.assert_allclose(slopes, [0, 0, 0, 1, 1, 1], atol=1e-30)


@pytest.mark.parametrize("transpose", [True, False])
def test_what_it_lowers_to(transpose, cuda_custom_calls):
    """For CUDA one custom call and nothing that touches a tensor; on a CPU the activation in jnp, then one."""
    x = jnp.ones((4, 8, 2, 16), jnp.bfloat16)

    def run(x, amax):
        return ops.quantize_activation(
            x, SCALE, oracle.E4M3.dtype, activation="silu_gated", transpose=transpose, amax=amax, rows=2
        )

    text = jax.jit(run).trace(x, SCALE).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["jaxfp8_quantize_activation_v2"]
    assert "operand_tuple_indices" in text  # the amax is raised in place
    assert not re.search(r"stablehlo\.(slice|transpose|multiply|logistic|convert|maximum)", text)
    text = jax.jit(run).lower(x, SCALE).as_text()
    assert re.findall(r"custom_call @(jaxfp8_\w+?)_v\d", text) == ["jaxfp8_quantize" + "_transpose" * transpose]


BAD = {
    "activation": ({"activation": "tanh"}, ValueError),
    "activation: None": ({"activation": None}, ValueError),
    "x: rank": ({"x": np.ones(4, np.float32)}, ValueError),
    "x: no pair": ({"x": np.ones((4, 3, 6), np.float32), "activation": "silu_gated"}, ValueError),
    "x: gated matrix": ({"x": np.ones((2, 6), np.float32), "activation": "silu_gated"}, ValueError),
    "x: rows": ({"rows": 2}, ValueError),
    "x: integers": ({"x": np.ones((4, 6), np.int32)}, TypeError),
    "scale": ({"scale": np.ones(2, np.float32)}, ValueError),
    "dtype": ({"dtype": np.float32}, TypeError),
    "amax": ({"amax": np.ones(2, np.float32)}, ValueError),
    "amax: bf16": ({"amax": np.ones((), oracle.BF16)}, TypeError),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_argument_is_named(case):
    change, exception = BAD[case]
    arguments = {"x": np.ones((4, 6), np.float32), "scale": SCALE, "dtype": oracle.E4M3.dtype, "activation": "gelu"}
    assert ops.quantize_activation(**arguments)[0].shape == (4, 6)
    with pytest.raises(exception, match=rf"quantize_activation: {case.split(':')[0]}\b"):
        ops.quantize_activation(**arguments | change)


def test_is_not_differentiable():
    def loss(x):
        return ops.quantize_activation(x, SCALE, oracle.E4M3.dtype, activation="gelu")[2]

    with pytest.raises(TypeError, match="quantize_activation is not differentiable"):
        jax.grad(loss)(jnp.ones((4, 6)))
