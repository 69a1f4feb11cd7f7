"""Each recipe's product against the oracle: what its GEMMs read to the bit, what they
give within a derived bound.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import F32, assert_bitwise

import jaxfp8
from jaxfp8.dot import _gemms, _high_precision, _product
from recipes import cases
from recipes.cases import KINDS, RECIPES, SHAPES

X, KERNEL, GRAD, _ = SHAPES["ragged"].arrays()


def operands_read(monkeypatch, run):
    """`gemm -> (a, b)`: what the three products of `run` read, as matrices
    `[batch, rows, contract]`.

    The primitive is stepped into: forward and backward run one after the other, outside
    of any trace.
    """
    read = {}

    def gemm(product, gemm_type, a, b, *options, **more):
        read[str(gemm_type)] = [
            _high_precision._matrices(x, product.batch) for x in (a, b)
        ]
        return whole(product, gemm_type, a, b, *options, **more)

    def multiply(product, x, kernel, bias, state, codes, group_sizes):
        differentiated = ["x", "kernel"]
        y, residuals = _gemms.forward(
            product, x, kernel, bias, state, codes, group_sizes, differentiated
        )
        _gemms.backward(
            product, x.shape, kernel.shape, differentiated, residuals, grads.pop(), None
        )
        return y

    whole = _gemms.Product.gemm
    monkeypatch.setattr(_gemms.Product, "gemm", gemm)
    grads = []
    with _product.replaced_by(multiply):
        run(grads.append)
    return read


def assert_read(got, wanted: cases.Codes, what):
    """Bitwise. One scale for all matrices may be there once."""
    codes = np.asarray(got.data)
    assert_bitwise(codes.reshape(wanted.codes.shape), wanted.codes, f"{what}: codes")
    if wanted.scales is None:
        assert got.scale_inv is None, what
        return
    scales = np.asarray(got.scale_inv)
    if wanted.block is None:
        assert_bitwise(scales, wanted.scales[0], f"{what}: scale_inv")
    else:
        assert_bitwise(
            scales.reshape(wanted.scales.shape), wanted.scales, f"{what}: scale_inv"
        )
        assert (got.block or (None,))[-1] == wanted.block[
            -1
        ] or got.block == wanted.block


def table(fast):
    """Each recipe with each shape; all but the fast ones are slow."""
    return [
        pytest.param(
            name, shapes, marks=[] if (name, shapes) in fast else pytest.mark.slow
        )
        for name in RECIPES
        for shapes in SHAPES
    ]


# All kinds, and every option once, with one shape; what only the order of dimensions
# decides, for one kind each.
READ = {
    (name, "blocks")
    for name in (
        *KINDS,
        "rowwise e4m3 power_2",
        "block hybrid power_2",
        "mx e5m2 floor",
    )
} | {
    ("mx", "both transposed"),
    ("block", "batch"),
    ("mx", "transpose between"),
    *((name, "blocks") for name in RECIPES if "|" in name),
    ("rowwise | current | mx", "transpose between"),
    ("rowwise | current | mx", "both transposed"),
}
RESULTS = (
    {(name, "7x5x3") for name in RECIPES if "|" in name}
    | {(name, "7x5x3") for name in KINDS}
    | {(KINDS[i % len(KINDS)], shapes) for i, shapes in enumerate(SHAPES)}
)


@pytest.mark.parametrize("name, shapes", table(READ))
def test_what_products_read(name, shapes, monkeypatch):
    """Codes and scales of both operands of fprop, dgrad and wgrad, to the bit."""
    (recipe, rule), shapes = RECIPES[name], SHAPES[shapes]
    x, kernel, grad, bias = shapes.arrays()
    wanted = shapes.expected(rule, x, kernel, grad, bias)

    def run(give):
        give(jnp.asarray(grad))
        cases.product(shapes, recipe)(jnp.asarray(x), jnp.asarray(kernel), bias)

    read = operands_read(monkeypatch, run)
    assert sorted(read) == ["dgrad", "fprop", "wgrad"]
    for gemm, pair in wanted.codes.items():
        for side, got, codes in zip("ab", read[gemm], pair, strict=True):
            assert_read(got, codes, f"{gemm} {side}")


@pytest.mark.parametrize("name, shapes", table(RESULTS))
def test_results(name, shapes):
    """y, both gradients and that of the bias, in the dtypes of what they are gradients
    of.
    """
    (recipe, rule), shapes = RECIPES[name], SHAPES[shapes]
    x, kernel, grad, bias = shapes.arrays(seed=1)
    y, dx, dkernel, dbias = cases.run(shapes, recipe, x, kernel, grad, bias)
    shapes.check(shapes.expected(rule, x, kernel, grad, bias), y, dx, dkernel, name)
    if bias is not None:
        sums = shapes.matrices(grad, shapes.y, "m", "n")
        assert (
            len(sums) == 1 and dbias.dtype == bias.dtype and dbias.shape == bias.shape
        )
        if bias.dtype == F32:
            oracle.assert_column_sums(np.asarray(dbias).reshape(-1), sums[0], "dbias")
        # a float32 sum, whose bound is far below half a unit of f16, and one rounding
        else:
            exact = sums[0].astype(np.float64).sum(0)
            np.testing.assert_allclose(dbias, exact, rtol=2**-10, atol=2**-20)


# -------------------------------------------------------------------------- hard values


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("where", ["x", "kernel", "grad"])
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["NaN", "Inf"])
def test_one_value_that_is_not_finite(name, where, value):
    """It is NaN in every result that needs it, and all others are as the oracle has
    them.
    """
    (recipe, rule), shapes = RECIPES[name], SHAPES["7x5x3"]
    arrays = dict(zip(("x", "kernel", "grad"), shapes.arrays()[:3], strict=True))
    arrays[where][1, 2] = value
    wanted = shapes.expected(rule, **arrays)
    results = cases.run(shapes, recipe, **arrays)[:3]
    shapes.check(wanted, *results, f"{name} {where}")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "size", [2.0**-120, 2.0**-140, 2.0**100], ids=["tiny", "subnormal", "huge"]
)
def test_far_from_one(name, size):
    """x of any size that float32 holds, subnormals too; the kernel brings the product
    back to ordinary numbers.
    """
    (recipe, rule), shapes = RECIPES[name], SHAPES["7x5x3"]
    x, kernel, grad, _ = shapes.arrays()
    x = (x.astype(np.float64) * size).astype(F32)
    back = min(1 / size, 2.0**110)
    kernel = (kernel.astype(np.float64) * back).astype(F32)
    grad = (grad.astype(np.float64) * 2.0**-10).astype(F32)
    shapes.check(
        shapes.expected(rule, x, kernel, grad),
        *cases.run(shapes, recipe, x, kernel, grad)[:3],
        name,
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("m, k, n", [(0, 5, 3), (7, 0, 3), (7, 5, 0)], ids=str)
def test_nothing(name, m, k, n):
    """Zero-size operands give zeros, and a bias alone."""
    shapes = cases.dense(m, k, n, bias=True)
    x, kernel, grad, bias = shapes.arrays()
    y, dx, dkernel, dbias = cases.run(shapes, RECIPES[name][0], x, kernel, grad, bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (m, n)))
    assert (
        dx.shape == x.shape
        and dkernel.shape == kernel.shape
        and not np.any(dx)
        and not np.any(dkernel)
    )
    np.testing.assert_allclose(dbias, grad.sum(axis=0), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------ options


@pytest.mark.parametrize("name", KINDS)
def test_no_state(name):
    """Stateless recipes have states without leaves, and take None, theirs or the empty
    one.
    """
    recipe, _ = RECIPES[name]
    assert not jax.tree.leaves(jaxfp8.init_state(recipe))
    want = jaxfp8.dot_general(X, KERNEL, cases.MATMUL, recipe=recipe)
    for state in (jaxfp8.init_state(recipe), jaxfp8.DotGeneralState(None, None, None)):
        np.testing.assert_array_equal(
            want,
            jaxfp8.dot_general(X, KERNEL, cases.MATMUL, recipe=recipe, state=state),
        )
    with pytest.raises((TypeError, ValueError), match="dot_general: state"):
        jaxfp8.dot_general(
            X,
            KERNEL,
            cases.MATMUL,
            recipe=recipe,
            state=jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2)),
        )


@pytest.mark.parametrize(
    "shape, dims",
    [
        ((6, 3, 40), (((1, 2), (0, 1)), ((), ()))),
        ((6, 3, 40), (((1,), (0,)), ((), ()))),
    ],
)
def test_quantized_matrices_that_do_not_fit(shape, dims):
    """`quantize_params` takes the dimensions before the last two for a batch, which
    this product has not.
    """
    recipe = jaxfp8.Float8BlockScaling()
    kernel = jaxfp8.quantize_params(
        {"a": jnp.ones(shape, jnp.float32)}, None, recipe, where="a"
    )["a"]
    x = jnp.ones((4, *shape[: len(dims[0][0])]), jnp.float32)
    with pytest.raises(
        ValueError, match="dot_general: kernel: a QTensor with a scale for each block"
    ):
        jaxfp8.dot_general(x, kernel, dims, recipe=recipe)


# -------------------------------------------------------------------------- debug_nans


# `jax_debug_nans` runs a program again, operation by operation, to find which it is.
NAMED = "invalid value .* result of (jax)?fp8_"


@pytest.mark.parametrize("zeros", [1, 32], ids=["a row of zeros", "zeros"])
@pytest.mark.parametrize("name", KINDS)
def test_debug_nans(name, zeros):
    """No operation makes a NaN or an Inf of good numbers, as docs/mixed_precision.md
    says; a bad one stops.
    """
    recipe = RECIPES[name][0]
    x, kernel = jnp.ones((32, 64)).at[:zeros].set(0), jnp.ones((64, 16))
    bad = [x.at[0, 0].set(value) for value in (np.nan, np.inf)]

    @jaxfp8.grad
    def gradient(kernel, x):
        y = jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe)
        return jnp.sum(jnp.tanh(y))

    with jax.debug_nans(True), jax.debug_infs(True):
        jax.jit(gradient)(kernel, x)
        for bad_x in bad:
            with pytest.raises(FloatingPointError, match=NAMED):
                jax.jit(gradient)(kernel, bad_x)
