"""ragged_dot with a scale for each block: results within the bound of exact sums of its
codes.
"""

import functools

import jax
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from jax.sharding import NamedSharding, PartitionSpec as P
from oracle import assert_bitwise, blocks as oracle_blocks
from recipes.cases import RECIPES, ByProduct

import jaxfp8
from jaxfp8 import ops

# Groups begin and end inside of blocks of 128 rows, and one is longer than a block.
SIZES = [100, 0, 150, 20]
ROWS, M, K, N = sum(SIZES), 300, 150, 140


def operands(dtype=np.float32):
    """lhs, rhs and the gradient of y, whose sizes differ from row to row; NaN beyond
    the last group.
    """
    rng = np.random.default_rng(0)
    lhs, rhs, grad = (
        rng.standard_normal(shape) for shape in ((M, K), (len(SIZES), K, N), (M, N))
    )
    lhs, grad = (x * 2.0 ** rng.integers(-3, 4, (M, 1)) for x in (lhs, grad))
    lhs[ROWS:], grad[ROWS:] = np.nan, np.inf
    return lhs.astype(dtype), rhs.astype(np.float32), grad.astype(dtype)


def expected_products(rule, lhs, rhs, grad):
    """The products by name."""
    if isinstance(rule, ByProduct):
        rules = {"y": rule.fprop, "dlhs": rule.dgrad, "drhs": rule.wgrad}
        return {
            name: expected_products(each, lhs, rhs, grad)[name]
            for name, each in rules.items()
        }
    lhs, grad = (
        np.where(np.arange(M)[:, None] < ROWS, x, np.zeros((), x.dtype))
        for x in (lhs, grad)
    )
    square, (of_lhs, of_rhs, of_grad) = rule.square or rule.tile, rule.bounds
    lhs_rows, lhs_cols = (
        rule.quantize(x[None], rule.tile, rule.forward, of_lhs) for x in (lhs, lhs.T)
    )
    rhs_cols, rhs_rows = (
        rule.quantize(x, square, rule.forward, of_rhs) for x in (rhs.mT, rhs)
    )
    grad_rows, grad_cols = (
        rule.quantize(x[None], rule.tile, rule.backward, of_grad)
        for x in (grad, grad.T)
    )
    read = {
        "y": (lhs_rows, rhs_cols),
        "dlhs": (grad_rows, rhs_rows),
        "drhs": (lhs_cols, grad_cols),
    }
    products, one = {}, np.ones((len(rhs), 1), rhs.dtype)
    for name, (a, b) in read.items():
        a_scales, b_scales = (one if x.scales is None else x.scales for x in (a, b))
        codes = b.codes
        if name == "drhs":
            codes, b_scales = codes[0], b_scales[0]
        options = {
            "a_block": a.block,
            "b_block": b.block,
            "out_dtype": rhs.dtype if name == "drhs" else lhs.dtype,
        }
        product = oracle_blocks.ragged_matmul(
            a.codes[0], codes, a_scales[0], b_scales, SIZES, **options
        )
        products[name] = product
    return products


def compare(name, dtype=np.float32, place=lambda *operands: operands):
    """One step against the oracle, of operands that `place` puts on a mesh. In float32
    no result hides a code that is off by one.
    """
    recipe, rule = RECIPES[name]
    lhs, rhs, grad = operands(dtype)

    @jax.jit
    def product(lhs, rhs):
        return jaxfp8.ragged_dot(
            lhs, rhs, np.int32(SIZES), recipe=recipe, preferred_element_type=lhs.dtype
        )

    y, vjp = jax.vjp(product, *place(lhs, rhs))
    gradients = vjp(jax.device_put(grad, y.sharding))
    expected = expected_products(rule, lhs, rhs, grad)
    results = zip(("y", "dlhs", "drhs"), (y, *gradients), strict=True)
    for what, result in results:
        expected[what].check(result, f"{name}: {what}")


SOME = ("current", "block", "rowwise", "mx", "static")
# each product once in high precision
SOME += ("current | block | None", "mx | None | rowwise", "None | None | block")


@pytest.mark.parametrize("name", SOME)
def test_recipes(name):
    compare(name)


@pytest.mark.parametrize("name", ["block", "mx", "current | block | None"])
def test_jit_in_bfloat16(name):
    compare(name, dtype=oracle.BF16)


@pytest.mark.parametrize(
    "lhs_spec, rhs_spec",
    [(P("x"), P("y")), (P("y"), P(None, None, "y")), (P(), P(None, None, ("x", "y")))],
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes(lhs_spec, rhs_spec, kind):
    """Cuts through groups and through blocks."""
    mesh = mesh_of(kind, x=2, y=2)

    def place(lhs, rhs):
        return (
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in ((lhs, lhs_spec), (rhs, rhs_spec))
        )

    with jax.set_mesh(mesh):
        compare("block", place=place)


def test_reference():
    with ops.implementation("reference"):
        compare("block")


@pytest.mark.parametrize(
    "recipe, platform, reason",
    [
        (jaxfp8.Float8BlockScaling(), "sm_90", None),
        (
            jaxfp8.Float8BlockScaling(),
            "sm_100",
            r"the kernel with scales for blocks \(\(1, 128\) by \(128, 128\)\) needs "
            "compute capability 9.0, this GPU has 10.0",
        ),
        (
            jaxfp8.MXFP8BlockScaling(),
            "sm_90",
            r"no kernel has scales for blocks \(\(1, 32\)",
        ),
    ],
    ids=["Hopper", "Blackwell", "MX"],
)
def test_custom_call(recipe, platform, reason, cuda_custom_calls):
    """Only Hopper's kernel has scales of blocks, those of `Float8BlockScaling`; for
    others `assert_fp8` says why there is none.
    """
    lhs, rhs, grad = operands()

    def products(lhs, rhs, grad):
        product = functools.partial(
            jaxfp8.ragged_dot, group_sizes=np.int32(SIZES), recipe=recipe
        )
        y, vjp = jax.vjp(product, lhs, rhs)
        return y, vjp(grad)

    arguments = lhs, rhs, grad
    if reason is None:
        jaxfp8.inspect.assert_fp8(products, *arguments, platform=platform)
        return
    with pytest.raises(AssertionError, match=f"ragged_matmul: {reason}"):
        jaxfp8.inspect.assert_fp8(products, *arguments, platform=platform)


def test_nan_in_a_group():
    """It is in the result of its row. A block of float32 scales that it shares with
    another group stays finite.
    """
    lhs, rhs, grad = operands()
    # the second group with rows, 100 and on, begins in its block of 128 rows
    lhs[90] = np.nan

    def product(lhs, rhs):
        return jaxfp8.ragged_dot(
            lhs, rhs, np.int32(SIZES), recipe=jaxfp8.Float8BlockScaling()
        )

    y, vjp = jax.vjp(product, lhs, rhs)
    _, drhs = vjp(np.where(np.isfinite(grad), grad, 0))
    assert np.flatnonzero(np.isnan(y).any(axis=1)).tolist() == [90]
    assert np.isnan(drhs[0]).all() and np.isfinite(drhs[1:]).all()


def test_vmap():
    lhs, rhs, _ = operands()
    lhs[ROWS:] = 0
    both, sizes = np.stack([lhs, 3 * lhs[::-1]]), np.int32([SIZES, SIZES[::-1]])

    def product(lhs, rhs, sizes):
        return jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=jaxfp8.Float8BlockScaling())

    got = jax.vmap(product, in_axes=(0, None, 0))(both, rhs, sizes)
    for i in range(2):
        assert_bitwise(
            got[i], np.asarray(product(both[i], rhs, sizes[i])), f"member {i}"
        )
