"""quantize_activation, its gradient's op and quantize_norm: codes, amax and sums of f32
values within a derived bound of the oracle; `activate` and `normalize`, their twins of
the gradient path."""

import dataclasses
import re

import jax
import numpy as np
import oracle
import pytest
from oracle import BF16, F16, F32, assert_bitwise, gradients as oracle_gradients

from jaxfp8 import ops

from . import cases
from .conftest import EACH_DTYPE, EACH_FORMAT

ACTIVATIONS = ("gelu", "silu", "relu", "silu_gated", "gelu_gated", "relu_squared")
ACTIVATIONS += ("clamped_gated",)
# A limit that many of the values are beyond.
CLAMPED = ops.ClampedSwiGLU(1.5, alpha=1.702, offset=1.0)
# kind, has a beta
NORMS = {
    "rms": ("rms", False),
    "layer": ("layer", False),
    "layer with beta": ("layer", True),
}
GRADIENTS = tuple(f"gradient of {name}" for name in ACTIVATIONS)
SCALE, EPSILON, E4M3, E5M2 = F32(3.3), 1e-6, oracle.E4M3.dtype, oracle.E5M2
ONE = F32(1)


def activation_of(name):
    name = name.removeprefix("gradient of ")
    return CLAMPED if name == "clamped_gated" else name


def inputs(name, shape, dtype, seed=0):
    """x; for norms rows of very different magnitudes, with means that are not small."""
    if name not in NORMS:
        return cases.random_values(
            (*shape[:-1], *(2,) * name.endswith("_gated"), shape[-1]), dtype, seed, 1.0
        )
    rng = np.random.default_rng(seed)
    rows = 2.0 ** rng.uniform(-4, 4, (*shape[:-1], 1))
    return (
        (rows * (rng.standard_normal(shape) + rng.uniform(-3, 3, rows.shape)))
        .astype(F32)
        .astype(dtype)
    )


def parameters(name, shape, dtype=F32):
    """gamma and beta of a norm; the gradient of an activation's result; nothing of an
    activation.
    """
    if name in ACTIVATIONS:
        return ()
    if name in GRADIENTS:
        return (cases.random_values(shape, dtype, 1, 1.0),)
    rng, n = np.random.default_rng(0), shape[-1]
    gamma = (1 + 0.3 * rng.standard_normal(n)).astype(dtype)
    beta = rng.standard_normal(n).astype(dtype)
    return gamma, beta if NORMS[name][1] else None


def run(name, x, *params, scale=SCALE, dtype=E4M3, epsilon=EPSILON, **options):
    if name in NORMS:
        return ops.quantize_norm(
            x, *params, scale, dtype, kind=NORMS[name][0], epsilon=epsilon, **options
        )
    op = ops.quantize_activation_grad if name in GRADIENTS else ops.quantize_activation
    return op(x, *params, scale, dtype, activation=activation_of(name), **options)


def values(name, x, *params, epsilon=EPSILON):
    """As the matrix that is quantized: gate and up of a gradient are columns."""
    if name in NORMS:
        return oracle.norm(x, *params, NORMS[name][0], epsilon)
    if name in ACTIVATIONS:
        return oracle.activation(x, activation_of(name))
    return oracle_gradients.activation(x, *params, activation_of(name)).rows()


def check(
    got, name, x, *params, scale=SCALE, fmt=oracle.E4M3, epsilon=EPSILON, **options
):
    data, data_t, top, *sums = (None if out is None else np.asarray(out) for out in got)
    m = len(x)
    expected = values(name, x, *params, epsilon=epsilon)
    columns = data.shape[1:]
    assert data_t is None or data_t.shape == (*columns, m)
    data = data.reshape(m, -1)
    data_t = None if data_t is None else data_t.reshape(-1, m)
    expected.check(data, data_t, top, scale, fmt, **options)
    for total in sums:
        assert total.shape == columns
        expected.sums().check(total.reshape(-1), f"{name}: sums")


@pytest.mark.parametrize("name", [*ACTIVATIONS, *NORMS, *GRADIENTS])
@EACH_DTYPE
@EACH_FORMAT
def test_values(implementation, fmt, dtype, name):
    """On a GPU long rows too, which do not fit into shared memory."""
    long = (
        ((100, 4096), (33, 16384), (1, 5001))
        if implementation == "cuda" and name in NORMS
        else ()
    )
    for shape in ((64, 128), (217, 41), (3, 1), (33, 257), (130, 72), (5, 1000), *long):
        x, params = inputs(name, shape, dtype, shape[0]), parameters(name, shape, dtype)
        # Without one of the results, in some shapes.
        without = {
            (64, 128): {"column_sums": False},
            (33, 257): {"transpose": False, "column_sums": False},
        }
        options = (
            {"column_sums": True} | without.get(shape, {}) if name in GRADIENTS else {}
        )
        got = run(name, x, *params, dtype=fmt.dtype, **options)
        check(got, name, x, *params, fmt=fmt, what=f"{name} of {shape}")


@pytest.mark.parametrize("name", GRADIENTS)
@EACH_DTYPE
def test_gradient_of_every_magnitude(implementation, dtype, name):
    """Tails on both sides, where nothing may cancel: from 2^-40 to 2^40 a derivative is
    between -0.2 and 1.2.
    """
    rng, shape = np.random.default_rng(5), (64, *(2,) * name.endswith("_gated"), 128)
    powers = 2.0 ** rng.uniform(-40, 15 if dtype == F16 else 40, shape) * rng.choice(
        [-1, 1], shape
    )
    x = powers.astype(F32).astype(dtype)
    (grad,) = parameters(name, (64, 128), dtype)
    with np.errstate(over="ignore"):
        check(
            run(name, x, grad, scale=ONE, dtype=E5M2.dtype),
            name,
            x,
            grad,
            scale=ONE,
            fmt=E5M2,
        )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_corner_cases(implementation, name):
    """f32 of every magnitude; gated, against every kind of factor."""
    x = oracle.f32_corner_cases(3)[:4096].reshape(16, -1)
    if name.endswith("_gated"):
        x = np.stack(
            [x, np.random.default_rng(4).permutation(x.ravel()).reshape(x.shape)],
            axis=1,
        )
    check(run(name, x, scale=ONE), name, x, scale=ONE)


# x; then gates and factors whose product is not finite.
EDGES = [np.nan, np.inf, -np.inf, -1000, 0, -0.0, 1000]
GATED_EDGES = [
    (0, np.inf),
    (-1000, np.inf),
    (np.inf, 0),
    (-np.inf, 1),
    (1, np.nan),
    (1000, np.inf),
]


@pytest.mark.parametrize("name", ["gelu", "silu"])
def test_edges(implementation, name):
    """Alone, so that each shows in the amax."""
    for value in EDGES:
        x = F32([[value, 0]])
        check(run(name, x, scale=ONE), name, x, scale=ONE, what=f"{name}({value})")
    for gate, up in GATED_EDGES:
        x = F32([[[gate, 1], [up, 1]]])
        got = run(f"{name}_gated", x, scale=ONE)
        check(got, f"{name}_gated", x, scale=ONE, what=f"{name}({gate}) * {up}")


# x and the gradient, one element; what is not finite is a NaN code and an infinite
# amax.
BAD = [
    ("silu", np.nan, 1),
    ("silu", 1, np.nan),
    ("gelu", 1, np.inf),
    ("relu", np.nan, np.nan),
    ("relu_squared", np.nan, 1),
]
BAD += [
    ("silu_gated", (np.nan, 1), 1),
    ("silu_gated", (1, np.inf), 1),
    ("gelu_gated", (1, 2), -np.inf),
    ("clamped_gated", (1, np.nan), 1),
]


@pytest.mark.parametrize("name, x, grad", BAD)
@pytest.mark.parametrize("n", [8, 5, 256])
def test_bad_gradients_stay_where_they_are(implementation, name, x, grad, n):
    """In vectors, element by element, and in a whole tile."""
    operand = np.ones((128, *(2,) * name.endswith("_gated"), n), F32)
    ct = np.ones((128, n), F32)
    operand[17, ..., 3], ct[17, 3] = x, grad
    name = f"gradient of {name}"
    check(run(name, operand, ct, scale=ONE), name, operand, ct, scale=ONE)


@pytest.mark.parametrize("m, n", [(3, 8), (130, 136)])
def test_nothing_outside_of_a_matrix_is_in_the_amax(implementation, m, n):
    """In a tile that is not full rows beyond the last have beta alone, which here the
    values add up to 0 with.
    """
    signs = np.resize(F32([1, -1]), n)
    params = -50 * signs, np.full(n, 50, F32)
    x = np.tile(signs, (m, 1))
    got = run("layer with beta", x, *params, epsilon=0)
    assert got[2] == 0
    check(got, "layer with beta", x, *params, epsilon=0)


@pytest.mark.parametrize("name", ["rms", "layer"])
def test_epsilon(implementation, name):
    """Large beside the variance; zero; a row of zeros and a constant row need it."""
    x = inputs(name, (6, 64), F32)
    x = np.concatenate([x, np.zeros((1, 64), F32), np.full((1, 64), 5, F32)])
    params = np.ones(64, F32), None
    for epsilon in (1e-6, 3.0):
        got = run(name, x, *params, epsilon=epsilon)
        check(got, name, x, *params, epsilon=epsilon, what=f"epsilon {epsilon}")
    got = run(name, x, *params, epsilon=0)
    assert np.isnan(oracle.widen(got[0])[6]).all() and np.isposinf(got[2])  # 0 / 0


def test_a_large_mean(implementation):
    """Variance by E[x^2] - E[x]^2 would lose all of it: 2^14 squared is 2^28, of which
    f32 keeps multiples of 16.
    """
    x = (2.0**14 + np.random.default_rng(1).integers(-3, 4, (8, 256))).astype(F32)
    params = parameters("layer", x.shape)
    # Sums of 256 integers below 2^15 are exact in f32 in any order, and so is the mean:
    # nothing but roundings of the distances and later is left, as for n = 8.
    exact = oracle.norm(x, *params, "layer", EPSILON, depth=8).exact
    tight = oracle.Values(exact, np.abs(exact) * 2.0**-8)
    tight.check(*map(np.asarray, run("layer", x, *params)), SCALE, oracle.E4M3)


@pytest.mark.parametrize("name", ["rms", "layer"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_their_row(implementation, name, bad):
    """An infinity leaves zeros beside it for "rms", as in Flax, and NaN for "layer"."""
    x = inputs(name, (5, 48), F32)
    params = parameters(name, x.shape)
    x[2, 7] = bad
    check(run(name, x, *params), name, x, *params)


OF_EACH_KIND = pytest.mark.parametrize(
    "name",
    [
        "gelu",
        "silu_gated",
        "rms",
        "layer with beta",
        "gradient of gelu",
        "gradient of silu_gated",
    ],
)


@OF_EACH_KIND
def test_the_amax_is_raised(implementation, name):
    x, params = inputs(name, (30, 24), BF16), parameters(name, (30, 24), BF16)
    top = float(run(name, x, *params)[2])
    for start in (0.25 * top, 4 * top, np.inf):
        got = run(name, x, *params, transpose=False, amax=F32(start))
        check(got, name, x, *params, start=start)


@OF_EACH_KIND
def test_rows_of_several_dimensions(implementation, name):
    """And batches of matrices, with the codes of one matrix."""
    x, params = inputs(name, (2, 3, 5, 24), BF16), parameters(name, (2, 3, 5, 24), BF16)

    def merged(part):
        if part is None or part.ndim == 1:
            return part
        return np.reshape(part, (30, *part.shape[3:]))

    codes, _, top = run(name, *map(merged, (x, *params)))
    columns = codes.shape[1:]
    for rows, batch in ((3, ()), (2, (2,)), (1, (2, 3))):
        data, data_t, amax = run(name, x, *params, rows=rows)
        assert data_t.shape == (*batch, *columns, *x.shape[len(batch) : 3])
        flat = np.reshape(data_t, (*batch, *columns, -1))
        back = np.moveaxis(flat, -1, len(batch)).reshape(codes.shape)
        assert_bitwise(merged(data), np.asarray(codes), "data")
        assert_bitwise(back, np.asarray(codes), f"rows={rows}")
        assert_bitwise(amax, np.asarray(top), "amax")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize(
    "name", ["gelu_gated", "layer with beta", "gradient of silu_gated"]
)
def test_no_elements(implementation, name, shape):
    x, params = inputs(name, shape, BF16), parameters(name, shape, BF16)
    data, data_t, top, *sums = run(
        name, x, *params, **({"column_sums": True} if name in GRADIENTS else {})
    )
    of_data = x.shape if name in GRADIENTS else shape
    assert (data.shape, data_t.shape, float(top)) == (
        of_data,
        (*of_data[1:], shape[0]),
        0,
    )
    assert all(total.shape == of_data[1:] and not np.any(total) for total in sums)


def test_slopes_at_the_limit(implementation):
    """1 at it, as below, and 0 beyond; of gate and up, on both sides."""
    name, grad = "gradient of clamped_gated", np.ones((1, 6), F32)
    limit, beyond = F32(1.5), np.nextafter(F32(1.5), F32(2))
    gate = [limit, beyond, limit, limit, limit, beyond]
    up = [0.5, 0.5, limit, beyond, -limit, -beyond]
    x = np.stack([gate, up]).astype(F32)[None]
    check(run(name, x, grad, scale=ONE), name, x, grad, scale=ONE)


@pytest.mark.parametrize(
    "number, value",
    [("limit", 0), ("limit", np.inf), ("alpha", -1), ("offset", np.nan)],
)
def test_bad_numbers_of_a_clamp_are_named(number, value):
    with pytest.raises(ValueError, match=f"ClampedSwiGLU: {number}: expected a .* got"):
        dataclasses.replace(CLAMPED, **{number: value})


LOWERED = {"silu_gated": "activation_v2", "layer with beta": "norm_v2"}
LOWERED |= dict.fromkeys(
    ["gradient of gelu", "gradient of silu_gated"], "activation_grad_v1"
)
OPTIONS = [
    (name, {"transpose": transpose}) for name in LOWERED for transpose in (True, False)
]
OPTIONS += [(name, {"column_sums": True}) for name in LOWERED if name in GRADIENTS]


@pytest.mark.parametrize("name, options", OPTIONS, ids=str)
def test_what_it_lowers_to(name, options, cuda_custom_calls):
    """For CUDA one custom call, and sums of a norm's rows or of parts of column sums;
    on a CPU jnp, then one.
    """
    x = inputs(name, (4, 8, 16), BF16)
    params = parameters(name, (4, 8, 16), BF16)
    traced = jax.jit(
        lambda x, *rest: run(name, x, *rest[:-1], amax=rest[-1], rows=2, **options)
    ).trace(x, *params, SCALE)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == [
        f"jaxfp8_quantize_{LOWERED[name]}"
    ]
    assert "operand_tuple_indices" in text  # the amax is raised in place
    # Of x, and of the squares of what is centered; or of columns.
    assert len(re.findall(r"stablehlo\.reduce", text)) == (
        2 if name in NORMS else "column_sums" in options
    )
    assert not re.search(r"stablehlo\.(transpose|maximum|logistic)", text)
    calls = re.findall(
        r"custom_call @(jaxfp8_\w+?)_v\d",
        traced.lower(lowering_platforms=("cpu",)).as_text(),
    )
    assert calls == ["jaxfp8_quantize" + "_transpose" * options.get("transpose", True)]
