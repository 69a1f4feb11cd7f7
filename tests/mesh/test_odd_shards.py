"""Shards of unequal size, empty ones, meshes that hardly are any, and all the ways to
say where arrays lie.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec as P
from parametrize import each_row

import jaxfp8
from mesh import cases

KINDS = ("auto", "explicit")
LAYOUT = cases.LAYOUTS["all"]
STATE = jaxfp8.init_state(cases.RECIPE)


def numbers(seed, shape, largest=7):
    """Multiples of 1/8 up to 3.5, and one that is the largest; as in `cases`, all sums
    of their products are exact.
    """
    rng = np.random.default_rng(seed)
    values = rng.integers(-28, 29, shape).astype(np.float32) / 8
    if values.size:
        values.flat[rng.integers(values.size)] = largest
    return values


def dot(x, kernel, state, **options):
    return jaxfp8.dot_general(
        x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state, **options
    )


def gradients(product):
    """`(x, kernel, state, target) -> (loss, gradients of x, kernel and state)`."""

    def step(x, kernel, state, target):
        def loss(*operands):
            return jnp.sum(product(*operands) * target)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, kernel, state)

    return step


def compare(step, tensors, mesh, specs, on_mesh=None):
    """A step on a mesh, of tensors that `specs` cut, or that are on no mesh for None,
    has the bits of one device; `on_mesh` is the step where it has to say where arrays
    lie.
    """
    wanted = jax.device_get(jax.jit(step)(*tensors))
    pairs = zip(tensors, specs, strict=True)
    with jax.set_mesh(mesh):
        placed = [
            tensor if spec is None else cases.put(tensor, mesh, spec)
            for tensor, spec in pairs
        ]
        cases.assert_same(jax.jit(on_mesh or step)(*placed), wanted, str(specs))


def line(devices=8, kind="auto"):
    return cases.mesh(kind, (devices,), ("d",))


# How x, kernel and y are cut.
CUTS = {
    "rows": (P("d"), P(), P("d")),
    "columns": (P(), P(None, "d"), P(None, "d")),
    "contracted": (P(None, "d"), P("d"), P()),
    "rows of all": (P("d"), P("d"), P("d")),
}


@pytest.mark.parametrize("m, k, n", [(10, 12, 14), (3, 16, 7), (1, 1, 1)])
@each_row("specs", CUTS)
def test_dimensions_that_the_devices_do_not_divide(specs, m, k, n):
    """Constraints on such dimensions are legal: XLA pads shards. The padding enters no
    product and no amax.
    """
    mesh = line()
    of_x, of_kernel, of_y = (NamedSharding(mesh, spec) for spec in specs)
    place = lax.with_sharding_constraint

    def product(x, kernel, state):
        return place(dot(place(x, of_x), place(kernel, of_kernel), state), of_y)

    tensors = numbers(0, (m, k)), numbers(1, (k, n), 3.5), STATE, numbers(2, (m, n))
    compare(gradients(dot), tensors, mesh, [P()] * 4, gradients(product))


@pytest.mark.parametrize("devices, heads", [(8, 12), (6, 4), (6, 9)])
def test_heads_that_some_devices_divide(devices, heads):
    """XLA cuts heads over a part of the mesh axis that cuts the features: 12 over 4 of
    8 devices, then each over 2.
    """

    def product(x, kernel, state):
        x = x.reshape(6, heads, 12)
        return jaxfp8.einsum("mhd,hdn->mn", x, kernel, recipe=cases.RECIPE, state=state)

    x, kernel = numbers(0, (6, 12 * heads)), numbers(1, (heads, 12, 4), 3.5)
    specs = P(None, "d"), P(), P(), P()
    tensors = x, kernel, STATE, numbers(2, (6, 4))
    compare(gradients(product), tensors, line(devices), specs)


@pytest.mark.parametrize(
    "rows, kernel_spec",
    [(P("d", None), P()), (P("d", None), P("d", None)), (P(), P(None, "d"))],
)
def test_blocks_whose_numbers_divide_other_parts_of_an_axis(rows, kernel_spec):
    """Of x `[192, 384]` two rows of blocks ask for 2 of 6 devices and three columns for
    3: no parts of 6 name both.
    """

    def product(x, kernel, state):
        del state
        recipe = jaxfp8.Float8BlockScaling(power_2_scale=True)
        return jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=recipe)

    def step(*tensors):
        _, of_operands = gradients(product)(*tensors)
        return of_operands  # the sum of so many terms rounds

    x, kernel = numbers(0, (192, 384)), numbers(1, (384, 384), 3.5)
    tensors = x, kernel, np.float32(0), numbers(2, (192, 384))
    compare(step, tensors, line(6), (rows, kernel_spec, P(), P()))


def steps(run, weights, state, batches):
    """Three steps of `cases.mlp`."""
    got = cases.train(run, weights, state, batches[:3])
    cases.assert_same(got, cases.reference(steps=3), "3 steps")


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("context", ["none", "with mesh"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_set_mesh(kind, context):
    """The mesh is known from the arrays, or from the older context manager."""
    mesh = cases.mesh(kind)
    with mesh if context == "with mesh" else contextlib.nullcontext():
        steps(cases.jitted(mesh, LAYOUT), *cases.arguments(mesh, LAYOUT))


def test_outside_of_jit():
    mesh = cases.mesh("explicit")
    with jax.set_mesh(mesh):
        steps(cases.make_step(), *cases.arguments(mesh, cases.LAYOUTS["dp"]))


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_on_no_mesh(kind):
    """Arrays in numpy, while a mesh is set: JAX's own products take that."""
    with jax.set_mesh(cases.mesh(kind)):
        step = jax.jit(cases.make_step())
        steps(step, cases.weights(), cases.state(), cases.batches())


def test_a_kernel_on_no_mesh():
    """While the data are on a mesh with explicit axes."""
    tensors = numbers(0, (8, 16)), numbers(1, (16, 8), 3.5), STATE, numbers(2, (8, 8))
    specs = P("d"), None, None, P("d")
    compare(gradients(dot), tensors, line(kind="explicit"), specs)


@pytest.mark.parametrize(
    "kind, spmd_axis_name", [("auto", None), ("auto", "data"), ("explicit", None)]
)
@pytest.mark.parametrize("own", ["", "kernel", "state", "kernel, state"])
def test_vmap(own, kind, spmd_axis_name):
    """A batch over "data", of x and of what its members own; rows are cut over "fsdp",
    columns over "tp". The second of two steps.
    """
    members = 4
    in_axes = (0, 0 if "kernel" in own else None, 0 if "state" in own else None)
    sizes = np.float32([[[2.0**-i]] for i in range(members)])
    x = sizes * np.stack([numbers(i, (8, 16)) for i in range(members)])
    target = np.stack([numbers(10 + i, (8, 12)) for i in range(members)]) / sizes
    kernel = np.stack([numbers(20 + i, (16, 12), 3.5) for i in range(members)])
    kernel = kernel if "kernel" in own else kernel[0]
    state = cases.stacked(STATE, members) if "state" in own else STATE

    def train(*tensors, **options):
        product = jax.vmap(dot, in_axes=in_axes, **options)
        x, kernel, state, target = tensors
        _, (_, _, state) = gradients(product)(*tensors)
        return gradients(product)(x, kernel, state, target)

    of_kernel = ("data", None, "tp") if "kernel" in own else (None, "tp")
    of_state = ("data",) if "state" in own else ()
    specs = P("data", "fsdp"), P(*of_kernel), P(*of_state), P("data", "fsdp", "tp")
    on_mesh = functools.partial(train, spmd_axis_name=spmd_axis_name)
    compare(train, (x, kernel, state, target), cases.mesh(kind), specs, on_mesh)


@pytest.mark.parametrize("is_shared", [False, True], ids=["own state", "shared state"])
@pytest.mark.parametrize("kind, is_remat", [("auto", False), ("explicit", True)])
def test_scan_over_stacked_layers(kind, is_remat, is_shared):
    """Kernels `[layers, k, n]` cut over "fsdp" and "tp"; a state for each, or one for
    all. The second of two steps.
    """
    layers = 4

    def train(x, kernels, state, target, out=None):
        def product(x, kernels, state):
            def body(x, layer):
                kernel, own = layer
                y = cases.dot(x, kernel, state if is_shared else own, out_sharding=out)
                return cases.activation(y / 8, jnp.ones_like(y)), None

            body = jax.checkpoint(body) if is_remat else body
            return lax.scan(body, x, (kernels, None if is_shared else state))[0]

        _, (_, _, state) = gradients(product)(x, kernels, state, target)
        return gradients(product)(x, kernels, state, target)

    tensors = (
        numbers(0, (8, 16, 32)),
        numbers(2, (layers, 32, 32), 3.5),
        STATE if is_shared else cases.stacked(STATE, layers),
        numbers(1, (8, 16, 32)),
    )
    specs = P("data"), P(None, "fsdp", "tp"), P(), P("data")
    out = P("data") if kind == "explicit" else None
    on_mesh = functools.partial(train, out=out)
    compare(train, tensors, cases.mesh(kind), specs, on_mesh)


def test_exported():
    """A program for 8 devices, written out and read again."""
    mesh = cases.mesh()
    weights, state, batches = cases.arguments(mesh, LAYOUT)

    def of_tensors(weights, state, *tensors):
        return jax.value_and_grad(cases.loss, argnums=(0, 1))(
            weights, state, cases.Batch(*tensors)
        )

    leaves = jax.tree.leaves(batches[0])
    written = export.export(jax.jit(of_tensors))(weights, state, *leaves).serialize()
    read = jax.jit(export.deserialize(written).call)

    @jax.jit
    def step(weights, state, batch):
        value, (of_weights, of_state) = read(weights, state, *jax.tree.leaves(batch))
        weights = cases.next_weights(weights, of_weights)
        return weights, jaxfp8.update_state(state, of_state), value

    steps(step, weights, state, batches)
