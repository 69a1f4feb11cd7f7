"""Recipes on meshes: in `jit` what one device gives, in `shard_map` what each device's
shards give; within bounds.
"""

import dataclasses

import jax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh import cases as meshes, hlo
from programs.known_amax import sum_of

from recipes import cases
from recipes.cases import KINDS, RECIPES

# name -> (kind of axes, how x, kernel and grad are cut); blocks lie on two devices in
# all of them.
PLACES = {
    "data": ("auto", P("data"), P(), P("data")),
    "FSDP": ("auto", P(("data", "tp")), P(("data", "tp")), P(("data", "tp"))),
    "columns": ("auto", P("data"), P(None, "tp"), P("data", "tp")),
    "rows": ("auto", P("data", "tp"), P("tp"), P("data")),
    "explicit data": ("explicit", P("data", None), P(None, None), P("data", None)),
    "explicit columns": ("explicit", P("data", None), P(None, "tp"), P("data", "tp")),
}
SHAPES, PART = cases.dense(24, 136, 16), cases.dense(6, 136, 16)


def compare_any_numbers(name, where, shapes=SHAPES):
    """Scales that are no powers of two are those of one device: within its bounds. An
    amax of a shard would not be.

    In float32: devices round their parts of a sum to its dtype before they add them, as
    those of `lax.dot_general`.
    """
    recipe, rule = RECIPES[name]
    kind, *specs = PLACES[where]
    x, kernel, grad, _ = shapes.arrays()
    mesh = meshes.mesh(kind, (4, 2), ("data", "tp"))
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(a, NamedSharding(mesh, s))
            for a, s in zip((x, kernel, grad), specs, strict=True)
        )
        results = cases.run(shapes, recipe, *placed)[:3]
    shapes.check(shapes.expected(rule, x, kernel, grad), *results, f"{name} {where}")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", KINDS)
def test_any_numbers(name, where):
    compare_any_numbers(name, where)


@pytest.mark.parametrize(
    "name, where",
    [
        ("current | block | None", "columns"),
        ("current | block | None", "explicit data"),
        ("rowwise | current | mx", "FSDP"),
    ],
)
def test_any_numbers_by_product(name, where):
    compare_any_numbers(name, where)


# Blocks of 32 are 2, 6 and 4, and blocks of 128 are 2, 6 and 2: some of the devices
# divide these numbers, and XLA cuts scales over a part of a mesh axis.
FEW = {"mx": cases.dense(64, 192, 128), "block": cases.dense(256, 768, 256)}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", FEW)
def test_blocks_that_some_devices_divide(name, where):
    compare_any_numbers(name, where, FEW[name])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check_vma"])
def test_shard_map(name, checked):
    """Current scaling reduces its amax; blocks are those of the rows that a device has.
    Kernel gradients are sums.
    """
    recipe, rule = RECIPES[name]
    recipe = dataclasses.replace(recipe, pipeline_axes=())
    x, kernel, grad, _ = SHAPES.arrays()
    mesh = meshes.mesh("auto", (4,), ("data",))

    def inside(x, kernel, grad):
        y, vjp = jax.vjp(cases.product(SHAPES, recipe), x, kernel)
        dx, dkernel = vjp(grad)
        return y, dx, dkernel if checked else lax.psum(dkernel, "data")

    rows = P("data")
    run = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=(rows, P(), rows),
        out_specs=(rows, rows, P()),
        check_vma=checked,
    )
    y, dx, dkernel = jax.jit(run)(x, kernel, grad)
    parts = [
        PART.expected(rule, x[i : i + 6], kernel, grad[i : i + 6])
        for i in range(0, 24, 6)
    ]
    if name == "current":
        whole = SHAPES.expected(rule, x, kernel, grad)
        SHAPES.check(whole, y, dx, dkernel, name)
        return
    for i, part in enumerate(parts):
        mine = slice(6 * i, 6 * i + 6)
        part.y.check(y[None, mine], f"y of device {i}")
        part.dx.check(dx[None, mine], f"dx of device {i}")
    sum_of([part.dkernel for part in parts]).check(dkernel.T[None], "dkernel")


@pytest.mark.parametrize("name", KINDS)
def test_what_recipes_send(name):
    """On data-parallel devices tiles along rows of x need no collective in the forward;
    one scale does.
    """
    x, kernel, *_ = SHAPES.arrays()
    mesh = meshes.mesh("auto", (8,), ("data",))
    put = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in ((x, P("data")), (kernel, P()))
    )
    with jax.set_mesh(mesh):
        text = (
            jax.jit(cases.product(SHAPES, RECIPES[name][0]))
            .lower(*put)
            .compile()
            .as_text()
        )
    assert bool(hlo.collectives(text)) == (name == "current")
