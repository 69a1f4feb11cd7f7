"""Recipes on meshes: in `jit` what one device gives, in `shard_map` what each device's shards give.

Layouts: bitwise, with the model of `mesh/cases.py`, which is exact in any order where scales are powers of two. Then
rounding to FP8 coarsens numbers that are multiples of a power of two, which they stay, and sums of their products need
no rounding. Which power of two a scale is hardly shows there. Scales: with any numbers, within the oracle's bounds.
"""

import dataclasses
import functools

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh import cases as meshes, hlo
from programs.known_amax import sum_of

import jaxfp8
from recipes import cases
from recipes.cases import KINDS, RECIPES

EXACT = {
    "current": jaxfp8.Float8CurrentScaling(),  # amaxes of tensors are 7 times a power of two, and so are scales
    "rowwise": jaxfp8.Float8RowwiseScaling(power_2_scale=True),
    "block": jaxfp8.Float8BlockScaling(power_2_scale=True),
    "mx": jaxfp8.MXFP8BlockScaling(),
}
BATCH = meshes.batches()[1]


def gradients(loss):
    """`(weights, state, batch) -> (loss, gradient of weights)`; every bit of the three products is in it."""
    return jax.value_and_grad(loss)


@functools.cache
def one_device(name):
    loss = functools.partial(meshes.loss, recipe=EXACT[name])
    return jax.device_get(jax.jit(gradients(loss))(meshes.weights(), meshes.stateless(), BATCH))


TABLE = [
    pytest.param(
        "auto" if i % 2 else "explicit",
        layout,
        KINDS[(i + j) % len(KINDS)],
        marks=[pytest.mark.slow] * (j or layout in ("fsdp", "sp")),
    )
    for i, layout in enumerate(meshes.LAYOUTS)
    for j in (0, 1)
]


@pytest.mark.parametrize("kind, layout, name", TABLE)
def test_layouts(kind, layout, name):
    """A forward and a backward of two layers, in every layout of `mesh/cases.py`."""
    mesh, of, recipe = meshes.mesh(kind), meshes.LAYOUTS[layout], EXACT[name]
    with jax.set_mesh(mesh):
        weights, state, batches = meshes.arguments(mesh, of, recipe, with_state=False)
        got = jax.jit(meshes.step_on(mesh, of, recipe, make_step=gradients))(weights, state, batches[1])
    meshes.assert_same(got, one_device(name), f"{name} {kind} {layout}")


# name -> (kind of axes, how x, kernel and grad are cut); blocks lie on two devices in all of them.
PLACES = {
    "data": ("auto", P("data"), P(), P("data")),
    "FSDP": ("auto", P(("data", "tp")), P(("data", "tp")), P(("data", "tp"))),
    "columns": ("auto", P("data"), P(None, "tp"), P("data", "tp")),
    "rows": ("auto", P("data", "tp"), P("tp"), P("data")),
    "explicit data": ("explicit", P("data", None), P(None, None), P("data", None)),
    "explicit columns": ("explicit", P("data", None), P(None, "tp"), P("data", "tp")),
}
SHAPES, PART = cases.dense(24, 136, 16), cases.dense(6, 136, 16)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.varied
def test_any_numbers(name, where):
    """Scales that are no powers of two are those of one device: within its bounds. An amax of a shard would not be.

    In float32: devices round their parts of a sum to its dtype before they add them, as those of `lax.dot_general`.
    """
    recipe, rule = RECIPES[name]
    kind, *specs = PLACES[where]
    x, kernel, grad, _ = SHAPES.arrays()
    mesh = meshes.mesh(kind, (4, 2), ("data", "tp"))
    with jax.set_mesh(mesh):
        placed = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, kernel, grad), specs, strict=True))
        results = cases.run(SHAPES, recipe, *placed)[:3]
    SHAPES.check(SHAPES.expected(rule, x, kernel, grad), *results, f"{name} {where}")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.varied
def test_shard_map(name, checked):
    """Current scaling reduces its amax; blocks are those of the rows that a device has. Kernel gradients are sums."""
    recipe, rule = RECIPES[name]
    recipe = dataclasses.replace(recipe, pipeline_axes=())
    x, kernel, grad, _ = SHAPES.arrays()
    mesh = meshes.mesh("auto", (4,), ("data",))

    def inside(x, kernel, grad):
        y, vjp = jax.vjp(cases.product(SHAPES, recipe), x, kernel)
        dx, dkernel = vjp(grad)
        return y, dx, dkernel if checked else lax.psum(dkernel, "data")

    rows = P("data")
    run = jax.shard_map(inside, mesh=mesh, in_specs=(rows, P(), rows), out_specs=(rows, rows, P()), check_vma=checked)
    y, dx, dkernel = jax.jit(run)(x, kernel, grad)
    whole = SHAPES.expected(rule, x, kernel, grad)
    parts = [PART.expected(rule, x[i : i + 6], kernel, grad[i : i + 6]) for i in range(0, 24, 6)]
    if name == "current":
        SHAPES.check(whole, y, dx, dkernel, name)
        return
    for i, part in enumerate(parts):
        mine = slice(6 * i, 6 * i + 6)
        part.y.check(y[None, mine], f"y of device {i}")
        part.dx.check(dx[None, mine], f"dx of device {i}")
    sum_of([part.dkernel for part in parts]).check(dkernel.T[None], "dkernel")
    if name == "mx":  # powers of two round alike in any block
        return
    with pytest.raises(AssertionError, match="out of bound"):  # not the blocks of all rows
        whole.dkernel.check(dkernel.T[None])


def test_what_recipes_say_to_each_other():
    """On data-parallel devices tiles along rows of x need no collective in the forward; one scale does."""
    mesh, of = meshes.mesh(), meshes.LAYOUTS["dp"]
    counts = {}
    for name, recipe in EXACT.items():
        with jax.set_mesh(mesh):
            weights, state, (batch, *_) = meshes.arguments(mesh, of, recipe, with_state=False)
            forward = jax.jit(functools.partial(meshes.mlp, recipe=recipe)).lower(weights, state, batch).compile()
        counts[name] = len(hlo.collectives(forward.as_text()))
    assert counts["current"] >= 2 and counts["rowwise"] == counts["block"] == counts["mx"] == 0, counts
