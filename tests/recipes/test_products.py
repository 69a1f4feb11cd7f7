"""Each recipe's product against the oracle: results within the bound of exact sums of
its codes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import F32

import jaxfp8
from recipes import cases
from recipes.cases import KINDS, RECIPES, SHAPES

X, KERNEL, *_ = SHAPES["ragged"].arrays()


# In float32 no result hides a code that is off by one: a bound is that of the sums.
# All kinds, and every option once, with blocks that have a rest; what only the order of
# dimensions decides, for one kind each; a bias of a recipe for each product.
RESULTS = (
    {(KINDS[i % len(KINDS)], shapes) for i, shapes in enumerate(SHAPES)}
    | {(name, "blocks") for name in RECIPES}
    | {("mx", "both transposed"), ("mx", "transpose between"), ("block", "batch")}
    | {
        ("rowwise | current | mx", "both transposed"),
        ("rowwise | current | mx", "transpose between"),
        ("current | block | None", "f16"),
    }
)


@pytest.mark.parametrize("name, shapes", sorted(RESULTS))
def test_results(name, shapes):
    """y, both gradients and that of the bias, in the dtypes of what they are gradients
    of.
    """
    (recipe, rule), shapes = RECIPES[name], SHAPES[shapes]
    x, kernel, grad, bias = shapes.arrays(seed=1)
    y, dx, dkernel, dbias = cases.run(shapes, recipe, x, kernel, grad, bias)
    shapes.check(shapes.expected(rule, x, kernel, grad, bias), y, dx, dkernel, name)
    if bias is not None:
        sums = shapes.matrices(grad, shapes.names[2], "m", "n")
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
NAMED = "invalid value .* in (jax)?fp8_"


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
