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

import jaxfp8
from mesh import cases

KINDS = ("auto", "explicit")
LAYOUT = cases.LAYOUTS["all"]


def numbers(seed, shape, largest=7):
    """Multiples of 1/8 up to 3.5, and one that is the largest; as in `cases`, all sums
    of their products are exact.
    """
    rng = np.random.default_rng(seed)
    values = rng.integers(-28, 29, shape).astype(np.float32) / 8
    if values.size:
        values.flat[rng.integers(values.size)] = largest
    return values


def one_product(m, k, n):
    """`(x, kernel, target)`."""
    return numbers(0, (m, k)), numbers(1, (k, n), 3.5), numbers(2, (m, n))


def step(x, kernel, target, state, place=lambda value, name: value, out=None):
    """The loss, and the gradients of state, x and kernel, of one product."""

    def loss(state, x, kernel):
        x = place(x, "x")
        kernel = place(kernel, "kernel")
        y = jaxfp8.dot_general(
            x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state, out_sharding=out
        )
        return jnp.sum(place(y, "y") * target)

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(state, x, kernel)


def line(kind="auto"):
    """A mesh of 8 devices in a line."""
    return cases.mesh(kind, (8,), ("d",))


# How x, kernel and y are cut.
CUTS = {
    "rows": (P("d"), P(), P("d")),
    "columns": (P(), P(None, "d"), P(None, "d")),
    "contracted": (P(None, "d"), P("d"), P()),
    "rows of all": (P("d"), P("d"), P("d")),
}


def train_uneven(cut, shape):
    x_spec, kernel_spec, y_spec = CUTS[cut]
    specs = {"x": x_spec, "kernel": kernel_spec, "y": y_spec}
    mesh = line()

    def place(value, name):
        return lax.with_sharding_constraint(value, NamedSharding(mesh, specs[name]))

    tensors = one_product(*shape)
    state = jaxfp8.init_state(cases.RECIPE)
    wanted = jax.jit(step)(*tensors, state)
    cases.assert_same(
        jax.jit(functools.partial(step, place=place))(*tensors, state),
        wanted,
        f"{cut} {shape}",
    )


@pytest.mark.parametrize("shape", [(10, 12, 14), (3, 16, 7), (1, 1, 1)])
@pytest.mark.parametrize("cut", CUTS)
def test_dimensions_that_the_devices_do_not_divide(cut, shape):
    """Constraints on such dimensions are legal: XLA pads shards. The padding enters no
    product and no amax.
    """
    train_uneven(cut, shape)


@pytest.mark.parametrize("devices, heads", [(8, 12), (6, 4), (6, 9)])
def test_heads_that_some_devices_divide(devices, heads):
    """XLA cuts heads over a part of the mesh axis that cuts the features: 12 over 4 of
    8 devices, then each over 2.
    """
    features = 12 * heads
    x = numbers(0, (6, features))
    kernel = numbers(1, (heads, 12, 4), 3.5)
    target = numbers(2, (6, 4))

    @jax.jit
    def step(x, kernel, target, state):
        def loss(state, x, kernel):
            y = jaxfp8.einsum(
                "mhd,hdn->mn",
                x.reshape(6, heads, 12),
                kernel,
                recipe=cases.RECIPE,
                state=state,
            )
            return jnp.sum(y * target)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(state, x, kernel)

    state = jaxfp8.init_state(cases.RECIPE)
    wanted = step(x, kernel, target, state)
    mesh = cases.mesh("auto", (devices,), ("d",))
    placed = cases.put((x, kernel, target), mesh, (P(None, "d"), P(), P()))
    with jax.set_mesh(mesh):
        cases.assert_same(
            step(*placed, state),
            jax.device_get(wanted),
            f"{heads} heads on {devices} devices",
        )


@pytest.mark.parametrize(
    "rows, kernel_spec",
    [(P("d", None), P()), (P("d", None), P("d", None)), (P(), P(None, "d"))],
)
def test_blocks_whose_numbers_divide_other_parts_of_an_axis(rows, kernel_spec):
    """Of x `[192, 384]` two rows of blocks ask for 2 of 6 devices and three columns for
    3: no parts of 6 name both.
    """
    x = numbers(0, (192, 384))
    kernel = numbers(1, (384, 384), 3.5)
    target = numbers(2, (192, 384))

    @jax.jit
    def step(x, kernel, target):
        def loss(x, kernel):
            y = jaxfp8.dot_general(
                x,
                kernel,
                cases.MATMUL,
                recipe=jaxfp8.Float8BlockScaling(power_2_scale=True),
            )
            return jnp.sum(y * target)

        return jax.grad(loss, argnums=(0, 1))(x, kernel)

    expected = jax.device_get(step(x, kernel, target))
    mesh = cases.mesh("auto", (6,), ("d",))
    placed = cases.put((x, kernel, target), mesh, (rows, kernel_spec, P()))
    with jax.set_mesh(mesh):
        cases.assert_same(step(*placed), expected, f"x {rows}, kernel {kernel_spec}")


def steps(run, weights, state, batches):
    """Three steps of `cases.mlp`."""
    cases.assert_same(
        cases.train(run, weights, state, batches[:3]),
        cases.reference(steps=3),
        "3 steps",
    )


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
    layout = cases.LAYOUTS["dp"]
    wanted = cases.reference(steps=2)
    with jax.set_mesh(mesh):
        weights, state, batches = cases.arguments(mesh, layout)
        cases.assert_same(
            cases.train(cases.make_step(), weights, state, batches[:2]), wanted, "eager"
        )


@pytest.mark.parametrize(
    "kind, spmd_axis_name", [("auto", None), ("auto", "data"), ("explicit", None)]
)
@pytest.mark.parametrize("own", ["", "kernel", "state", "kernel, state"])
def test_vmap(own, kind, spmd_axis_name):
    """A batch over "data", of x and of what its members own; rows are cut over "fsdp",
    columns over "tp".
    """
    mesh = cases.mesh(kind)
    members = 4
    in_axes = (0, 0 if "kernel" in own else None, 0 if "state" in own else None)
    state = jaxfp8.init_state(cases.RECIPE)
    sizes = [2.0**-i for i in range(members)]
    x = np.stack(
        [size * numbers(i, (8, 16)) for i, size in enumerate(sizes)], dtype=np.float32
    )
    target = np.stack(
        [numbers(10 + i, (8, 12)) / size for i, size in enumerate(sizes)],
        dtype=np.float32,
    )
    kernel = np.stack([numbers(20 + i, (16, 12), 3.5) for i in range(members)])
    kernel = kernel if "kernel" in own else kernel[0]
    if "state" in own:
        state = cases.stacked(state, members)

    def train(x, kernel, target, state, spmd_axis_name=None):
        def dot(x, kernel, state):
            return jaxfp8.dot_general(
                x, kernel, cases.MATMUL, recipe=cases.RECIPE, state=state
            )

        def loss(kernel, state):
            y = jax.vmap(dot, in_axes=in_axes, spmd_axis_name=spmd_axis_name)(
                x, kernel, state
            )
            return jnp.sum(y * target)

        _, first = jax.grad(loss, argnums=(0, 1))(kernel, state)
        return jax.value_and_grad(loss, argnums=(0, 1))(kernel, first)

    wanted = jax.jit(train)(x, kernel, target, state)
    of_kernel = ("data", None, "tp") if "kernel" in own else (None, "tp")
    of_state = ("data",) if "state" in own else ()
    specs = P("data", "fsdp"), P(*of_kernel), P("data", "fsdp", "tp"), P(*of_state)
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(train, spmd_axis_name=spmd_axis_name))
        tensors = (x, kernel, target, state)
        placed = [
            cases.put(tensor, mesh, spec)
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
        cases.assert_same(run(*placed), wanted, f"vmap {kind}, own {own}")


@pytest.mark.parametrize("is_shared", [False, True], ids=["own state", "shared state"])
@pytest.mark.parametrize("kind, is_remat", [("auto", False), ("explicit", True)])
def test_scan_over_stacked_layers(kind, is_remat, is_shared):
    """Kernels `[layers, k, n]` cut over "fsdp" and "tp"; a state for each, or one for
    all.
    """
    mesh = cases.mesh(kind)
    layers = 4
    x = numbers(0, (8, 16, 32))
    target = numbers(1, (8, 16, 32))
    kernels = numbers(2, (layers, 32, 32), 3.5)
    state = jaxfp8.init_state(cases.RECIPE)
    if not is_shared:
        state = cases.stacked(state, layers)

    def train(x, kernels, target, state, out=None):
        def loss(kernels, state):
            def body(x, layer):
                kernel, own = layer
                y = cases.dot(x, kernel, state if is_shared else own, out_sharding=out)
                return cases.activation(y / 8, jnp.ones_like(y)), None

            body = jax.checkpoint(body) if is_remat else body
            y, _ = lax.scan(body, x, (kernels, None if is_shared else state))
            return jnp.sum(y * target)

        _, first = jax.grad(loss, argnums=(0, 1))(kernels, state)
        return jax.value_and_grad(loss, argnums=(0, 1))(kernels, first)

    wanted = jax.jit(train)(x, kernels, target, state)
    assert np.all(wanted[1][1].output_grad.amax_history[..., 0] > 0)
    with jax.set_mesh(mesh):
        run = jax.jit(
            functools.partial(train, out=P("data") if kind == "explicit" else None)
        )
        tensors = (x, kernels, target, state)
        specs = (P("data"), P(None, "fsdp", "tp"), P("data"), P())
        placed = [
            cases.put(tensor, mesh, spec)
            for tensor, spec in zip(tensors, specs, strict=True)
        ]
        cases.assert_same(run(*placed), wanted, f"scan {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_on_no_mesh(kind):
    """Arrays in numpy, while a mesh is set: JAX's own products take that."""
    wanted = cases.reference(steps=2)
    with jax.set_mesh(cases.mesh(kind)):
        run = cases.train(
            jax.jit(cases.make_step()),
            cases.weights(),
            cases.state(),
            cases.batches()[:2],
        )
        cases.assert_same(run, wanted, kind)


def test_a_kernel_on_no_mesh():
    """While the data are on a mesh with explicit axes."""
    mesh = line("explicit")
    state = jaxfp8.init_state(cases.RECIPE)
    x, kernel, target = one_product(8, 16, 8)
    wanted = jax.jit(step)(x, kernel, target, state)
    with jax.set_mesh(mesh):
        x = cases.put(x, mesh, P("d"))
        target = cases.put(target, mesh, P("d"))
        cases.assert_same(jax.jit(step)(x, kernel, target, state), wanted, "numpy")


def test_exported():
    """A program for 8 devices, written out and read again."""
    mesh = cases.mesh()
    weights, state, batches = cases.arguments(mesh, LAYOUT)

    def gradients(weights, state, *tensors):
        return jax.value_and_grad(cases.loss, argnums=(0, 1))(
            weights, state, cases.Batch(*tensors)
        )

    written = export.export(jax.jit(gradients))(
        weights, state, *jax.tree.leaves(batches[0])
    ).serialize()
    read = jax.jit(export.deserialize(written).call)

    @jax.jit
    def step(weights, state, batch):
        value, (of_weights, of_state) = read(weights, state, *jax.tree.leaves(batch))
        return (
            cases.next_weights(weights, of_weights),
            jaxfp8.update_state(state, of_state),
            value,
        )

    steps(step, weights, state, batches)
