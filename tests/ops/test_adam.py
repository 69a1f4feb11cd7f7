"""adam_update: bitwise against the oracle, of several leaves, along any axis, under
vmap and on meshes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from equality import assert_all_bitwise
from jax.sharding import PartitionSpec as P
from oracle import F32, adam

from jaxfp8 import ops
from jaxfp8.ops import _adam_update

from . import test_moments as moments
from .conftest import ALL

IMPLEMENTATIONS = *ALL, pytest.param("tpu", marks=pytest.mark.ci)

APPLIES = pytest.mark.parametrize("applies", [False, True], ids=["update", "apply"])


def step_numbers(rng, rows=1, eps_root=1e-12):
    """The numbers of steps of some lengths, with and without clipping."""
    b1, b2 = rng.choice([0.5, 0.9, 0.95], rows), rng.choice([0.9, 0.99, 0.999], rows)
    t = rng.integers(1, 30, rows)
    columns = (
        b1,
        1 - b1,
        b2,
        1 - b2,
        1 / (1 - b1**t),
        1 / (1 - b2**t),
        eps_root,
        1e-8,
        1e-3,
        0.1,
    )
    return np.stack(
        [*np.broadcast_arrays(*columns), rng.choice([1, 0.37], rows)], axis=-1
    ).astype(F32)


def make_leaf(rng, shape, applies):
    """A leaf of any numbers and codes; the blocks of a moment have one of three
    exponents.
    """
    mu, nu = moments.moment(rng, shape), moments.moment(rng, shape)
    # Most squares have no sign; a NaN with one is infinity.
    signed = oracle.bits(nu[0]) & np.where(rng.random(shape) < 0.1, 0xFF, 0x7F).astype(
        np.uint8
    )
    signed = np.where((signed > 0x80) & (signed < 0xFF), signed & 0x7F, signed).astype(
        np.uint8
    )
    keys = rng.integers(0, 2**32, (2, *mu[1].shape), np.uint32)
    grads, params = (moments.numbers(rng, shape) for _ in range(2))
    nu = signed.view(nu[0].dtype), *nu[1:]
    return _adam_update.AdamLeaf(
        grads, params if applies else None, mu, nu, keys, step_numbers(rng)[0]
    )


def plain_leaf(rng, shape, applies):
    """A leaf of which most rows need no care on a GPU, and others are near that; with
    zeros of both signs.
    """
    leaf = make_leaf(rng, shape, applies)
    exponents = [-20, -10, 0, 10, -37, -40, -59, -75, -77, 15, 30, 31]
    size = np.exp2(F32(rng.choice(exponents, (shape[0], 1))))
    small = rng.choice(F32([1, 1, 2.0**-60, 2.0**-100]), (shape[0], 1))
    grads, params = rng.standard_normal((2, *shape)).astype(F32)

    def finite(codes):
        bits = oracle.bits(codes)
        return np.where(bits & 0x7F == 0x7F, bits & 0x80, bits).view(moments.E4M3)

    def amax(of_rows):
        return of_rows * rng.uniform(0.5, 1, leaf.mu[1].shape).astype(F32)

    square = np.where(size < 2.0**-50, F32(0), size * size)
    return leaf._replace(
        grads=grads * size * (rng.random(shape) >= 0.05),
        params=params * small if applies else None,
        mu=(finite(leaf.mu[0]), amax(size), leaf.mu[2]),
        nu=(finite(leaf.nu[0]), amax(square), leaf.nu[2]),
        numbers=step_numbers(rng, eps_root=rng.choice([0, 1e-12]))[0],
    )


LEAVES = pytest.mark.parametrize(
    "make", [make_leaf, plain_leaf], ids=["of all sizes", "plain"]
)


def expected(leaf, numbers=None):
    numbers = leaf.numbers[None] if numbers is None else numbers
    return adam.step(leaf.grads, leaf.params, leaf.mu, leaf.nu, *leaf.keys, numbers)


def placed(mesh, leaf, spec):
    """A leaf on a mesh, cut where devices divide a dimension."""
    cut = jax.tree.map(lambda x: moments.put(mesh, x, spec), leaf)
    return cut._replace(keys=moments.put(mesh, leaf.keys, (None, *spec)))


def assert_same(got, right, what=""):
    out, exact = np.asarray(got[0]), right[0]
    nan = np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(out), nan, f"{what} result")
    oracle.assert_bitwise(
        np.where(nan, 0, out),
        np.where(nan, 0, exact).astype(F32),
        f"{what} result",
    )
    for name, values, exact in zip(("mu", "nu"), got[1:], right[1:], strict=True):
        assert_all_bitwise(values, exact, f"{what} {name}")


@APPLIES
@LEAVES
@pytest.mark.parametrize("shape", moments.SHAPES, ids=str)
def test_values(implementation, shape, make, applies):
    rng = np.random.default_rng(shape[1])
    for _ in range(3):
        leaf = make(rng, shape, applies)
        assert_same(
            jax.jit(lambda x: _adam_update.adam_update([x], [1]))(leaf)[0],
            expected(leaf),
        )


@APPLIES
def test_leaves_share_a_call(implementation, applies):
    """More leaves than one call takes; each has numbers and keys of its own. One is
    empty.
    """
    rng = np.random.default_rng(2)
    shapes = [
        (int(rows), int(n))
        for rows, n in rng.integers(1, 300, (_adam_update.MAX_LEAVES + 3, 2))
    ] + [(0, 5)]
    leaves = [make_leaf(rng, shape, applies) for shape in shapes]
    run = jax.jit(lambda x: _adam_update.adam_update(x, [1] * len(x)))
    for i, (got, leaf) in enumerate(zip(run(leaves), leaves, strict=True)):
        assert_same(got, expected(leaf), f"leaf {i}:")
    if implementation == "ffi":
        assert run.lower(leaves).as_text().count("@jaxfp8_adam_update_v1") == 2


@APPLIES
def test_in_place(implementation, applies):
    """Donated arrays are written over; others stay."""
    rng = np.random.default_rng(0)
    leaf = make_leaf(rng, (128, 1000), applies)
    given, exact = jax.tree.map(jnp.array, leaf), expected(leaf)
    for donated in (None, 0):
        assert_same(
            jax.jit(
                lambda x: _adam_update.adam_update([x], [1]), donate_argnums=donated
            )(given)[0],
            exact,
        )
        if donated is None:
            jax.tree.map(
                lambda x, y: oracle.assert_bitwise(x, y, "operand"), given, leaf
            )


@pytest.mark.parametrize("axis", range(3))
def test_axes(implementation, axis):
    """Blocks along any axis are those of rows; members of a batch may have numbers of
    their own.
    """
    rng = np.random.default_rng(1)
    rows = make_leaf(rng, (12, 300), True)
    numbers = step_numbers(rng, 3)

    def move(x):
        cube = np.reshape(x, (*x.shape[:-2], 3, 4, x.shape[-1]))
        return np.moveaxis(cube, -1, x.ndim - 2 + axis)

    def step(leaf, axis):
        return _adam_update.adam_update([leaf], [axis])[0]

    cube = jax.tree.map(lambda x: move(x) if x.ndim > 1 else x, rows)
    right = jax.tree.map(move, expected(rows))
    assert_same(step(cube, axis), right, f"axis {axis}:")
    if axis > 0:
        batched = jax.tree.map(lambda x: max(x.ndim - 3, 0), cube)
        run = jax.vmap(functools.partial(step, axis=axis - 1), (batched,))
        right = jax.tree.map(move, expected(rows, numbers))
        assert_same(run(cube._replace(numbers=numbers)), right, "numbers for each:")


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("spec", moments.SPECS, ids=str)
@pytest.mark.parametrize("n", [1024, 384, 200])
@pytest.mark.parametrize("name", ["ffi", "tpu"])
def test_meshes(n, spec, kind, name):
    """The bits of one device, also of a leaf in the same call that lies otherwise;
    whole blocks are not gathered.
    """
    mesh = mesh_of(kind, x=4, y=2)
    rng = np.random.default_rng(n)
    leaves = [make_leaf(rng, (16, n), True), make_leaf(rng, (8, 256), True)]

    with jax.set_mesh(mesh), ops.implementation(name):
        specs = spec, P("y")
        operands = [placed(mesh, *pair) for pair in zip(leaves, specs, strict=True)]
        step = jax.jit(lambda x: _adam_update.adam_update(x, [1, 1]))
        program = step.lower(operands).compile()
        results = program(operands)
    for got, leaf in zip(results, leaves, strict=True):
        assert_same(got, expected(leaf))
    if name == "ffi":
        moments.assert_blocks_stay(program, mesh, n, spec)
