"""train.spread: states in a `shard_map` with the gradient outside of it are those of
one device, bit for bit, where types do not tell what devices share.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_mesh import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfp8
from mesh import cases, test_shard_map
from mesh.test_shard_map import RECIPE

LAYERS, WIDTH = 3, 16


def without_copies(state):
    return jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), state)


@pytest.mark.parametrize("checked", [False, True], ids=["no check_vma", "check_vma"])
def test_training(checked):
    """Ten steps, with collectives between the products."""
    mesh, layout = cases.mesh(), cases.LAYOUTS["fsdp+tp"]
    loss = test_shard_map.local_loss(layout, True, RECIPE)

    def on_device(weights, state, batch):
        return loss(weights, without_copies(state), batch)

    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(layout.weights, P(cases.AXES), layout.batch),
        out_specs=P(),
        check_vma=checked,
    )

    def outside(weights, state, batch):
        return mapped(weights, jaxfp8.train.spread(state, mesh.size), batch)

    run = test_shard_map.train(cases.make_step(outside), mesh, layout)
    cases.assert_same(run, cases.reference(), "copies")


def layers(around, layer):
    """The loss of a scan over layers, each of which `around` wraps."""

    def loss(state, kernels, x):
        def body(x, of_layer):
            y = around(layer)(*of_layer, x)
            return cases.activation(y, jnp.ones_like(y)), None

        y, _ = lax.scan(body, x, (state, kernels))
        return jnp.sum(y * y)

    return loss


def product(state, kernel, x):
    return jaxfp8.dot_general(x, kernel, cases.MATMUL, recipe=RECIPE, state=state)


def mapped_layer(data=2, checked=False):
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(data=data, tp=2),
        in_specs=(P(("data", "tp")), P(None, "tp"), P("data")),
        out_specs=P("data", "tp"),
        check_vma=checked,
    )
    def on_device(state, kernel, x):
        return product(without_copies(state), kernel, x)

    def layer(state, kernel, x):
        return on_device(jaxfp8.train.spread(state, 2 * data), kernel, x)

    return layer


@functools.cache
def operands():
    """Small integers, in every layer and step others."""
    rng = np.random.default_rng(0)
    kernels = rng.integers(-3, 4, (LAYERS, WIDTH, WIDTH)).astype(np.float32) / 4
    return kernels, rng.integers(-8, 9, (8, WIDTH)).astype(np.float32)


def two_steps(gradient, loss):
    """The state of all layers after two steps."""

    @jax.jit
    def run(kernels, x):
        state = cases.stacked(jaxfp8.init_state(RECIPE), LAYERS)
        state = gradient(loss)(state, kernels, x)
        return gradient(loss)(state, kernels, 2 * x)

    return run(*operands())


@pytest.mark.parametrize(
    "data, around, gradient",
    [(2, jax.checkpoint, jax.grad), (4, lambda layer: layer, jaxfp8.grad)],
    ids=["remat", "scan"],
)
def test_layers(data, around, gradient):
    """A map in each layer, whose state has a row for each layer."""
    wanted = two_steps(gradient, layers(around, product))
    got = two_steps(gradient, layers(around, mapped_layer(data)))
    cases.assert_same(got, jax.device_get(wanted), "layers")


def test_types_without_axes_of_one_device():
    """An option of JAX that MaxText sets; such an axis comes first here."""
    layer = mapped_layer(1, checked=True)
    (kernel, *_), x = operands()
    state = jaxfp8.init_state(RECIPE)
    option = "jax_remove_size_one_mesh_axis_from_type"
    before = getattr(jax.config, option)
    jax.config.update(option, True)
    try:
        gradient = jaxfp8.grad(lambda state: jnp.sum(layer(state, kernel, x)))
        new = jax.jit(gradient)(state)
    finally:
        jax.config.update(option, before)
    assert new.input.amax_history[0] == np.abs(x).max()
