"""ragged_dot on meshes: rows and experts stay where they are, kernels cross devices as
codes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from dot.ragged_cases import HISTORY, RECIPE, WITHOUT, operands
from jax.sharding import NamedSharding, PartitionSpec as P
from parametrize import each_row
from recipes.delayed_cases import assert_step

import jaxfp8
from mesh import hlo


@pytest.mark.parametrize(
    "lhs_spec, rhs_spec",
    [
        (("x",), ()),
        ((None, "x"), (None, "x")),
        ((), ("x",)),
        ((), (None, None, "x")),
        (("x",), (None, None, "y")),
        (("x",), ("y",)),
        (("x",), ("x",)),
        (("x",), (None, None, "x")),
        ((), (("x", "y"),)),
    ],
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_meshes(lhs_spec, rhs_spec, kind):
    """One step, of operands that a mesh of 2 by 2 devices cuts: rows, experts, k and n.
    A group lies on both sides of a cut; a device finds its groups in the sizes of all.
    """
    mesh = mesh_of(kind, x=2, y=2)
    lhs, rhs, grad = operands(4)
    sizes = [30, 7, 0, 40]
    expected = oracle.ragged_step(
        lhs, rhs, sizes, grad, oracle.LayerState.init(HISTORY)
    )
    lhs, rhs = (
        jax.device_put(x, NamedSharding(mesh, P(*spec)))
        for x, spec in ((lhs, lhs_spec), (rhs, rhs_spec))
    )

    @jax.jit
    def step(lhs, rhs, grad, state):
        def product(lhs, rhs, state):
            return jaxfp8.ragged_dot(
                lhs, rhs, jnp.int32(sizes), recipe=RECIPE, state=state
            )

        y, vjp = jax.vjp(product, lhs, rhs, state)
        if kind == "Explicit":
            grad = jax.sharding.reshard(grad, jax.typeof(y).sharding)
        return (y, *vjp(grad))

    with jax.set_mesh(mesh):
        assert_step(step(lhs, rhs, grad, jaxfp8.init_state(RECIPE)), expected, "mesh")


# Of the width each of eight devices has whole blocks of 128.
G, ROWS, WIDTH, HIDDEN = 8, 2048, 1024, 128
FP8 = {"current": jaxfp8.Float8CurrentScaling(), "block": jaxfp8.Float8BlockScaling()}


def collectives_of(recipe, lhs_spec, rhs_spec, axes):
    """The collectives of a gradient, of kernels that are quantized where they are; all
    operands keep their place.
    """
    mesh = mesh_of(**axes)
    lhs_sharding, rhs_sharding = (
        NamedSharding(mesh, P(*spec)) for spec in (lhs_spec, rhs_spec)
    )

    def loss(lhs, rhs, sizes):
        rhs = jaxfp8.quantize_params({"up": rhs}, None, recipe, where="up")["up"]
        y = jaxfp8.ragged_dot(lhs, rhs, sizes, recipe=recipe, state=WITHOUT)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    places = lhs_sharding, rhs_sharding
    step = jax.jit(
        jax.grad(loss, (0, 1)),
        in_shardings=(*places, NamedSharding(mesh, P())),
        out_shardings=places,
    )
    shapes = (
        ((ROWS, WIDTH), jnp.bfloat16),
        ((G, WIDTH, HIDDEN), jnp.float32),
        ((G,), jnp.int32),
    )
    lowered = step.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return hlo.collectives(lowered.compile(hlo.QUICKLY).as_text())


@each_row("recipe", FP8)
def test_rows_stay_and_kernels_are_gathered_as_codes(recipe):
    """FSDP over rows and kernels: once for y and once for the gradient of lhs, as
    codes; no row crosses devices.
    """
    found = collectives_of(recipe, ("fsdp",), (None, "fsdp"), {"fsdp": 8})
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {
        dtype
        for c in gathers
        for dtype, shape in c.results
        if np.prod(shape) >= G * WIDTH * HIDDEN
    } == {"u8"}
    assert sum(c.bytes for c in gathers) <= 0.52 * 2 * (2 * G * WIDTH * HIDDEN)
    shapes = {shape for c in found for _, shape in c.results}
    assert not any(ROWS in shape for shape in shapes)


@each_row("recipe", FP8)
def test_rows_and_experts_stay(recipe):
    """Rows on one axis and experts on the other: results of rows are summed over the
    experts.

    Nothing is gathered but scales of blocks of rows, a float32 for 128 codes of lhs and
    of the gradient.
    """
    found = collectives_of(recipe, ("data",), ("expert",), {"data": 2, "expert": 4})
    scales = ROWS * (WIDTH + HIDDEN) * 4 // 128 if recipe is FP8["block"] else 0
    assert sum(c.bytes for c in found if c.kind == "all-gather") == scales
    largest = max(np.prod(shape) for c in found for _, shape in c.results)
    assert largest == max(G // 4 * WIDTH * HIDDEN, ROWS // 2 * WIDTH)
