"""Meshes: fractions of the whole tensor; pipeline stages count for themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxfp8

from .counter_cases import (
    OPERANDS,
    RECIPE,
    ROWS_BY_COLUMNS,
    Expected,
    assert_counters,
    counted_state,
    of_state,
    tensors,
)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(kind):
    """x, kernel and grad cut along different axes: the fractions of whole tensors, which are one device's bits."""
    x, kernel, grad = tensors(5, uses=2)
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(kind,) * 2)
    place = lambda value, *spec: jax.device_put(value, NamedSharding(mesh, P(*spec)))  # noqa: E731
    state, expected = jax.device_put(counted_state(), NamedSharding(mesh, P())), Expected()
    kernel_placed = place(kernel, None, "tp")

    def loss(state, kernel, x, grad):
        out = P("data", "tp") if kind == AxisType.Explicit else None
        y = jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=RECIPE, state=state, out_sharding=out)
        return jnp.sum(y * grad)

    with jax.set_mesh(mesh):
        for step, of in enumerate(zip(x, grad, strict=True)):
            wanted = (0,) if step == 0 else (0, 1)  # without a gradient of the kernel nothing is transposed
            placed = place(of[0], "data"), place(of[1], "data", "tp")
            gradient, *_ = jax.jit(jax.grad(loss, argnums=wanted))(state, kernel_placed, *placed)
            state = jaxfp8.update_state(state, gradient)
            assert_counters(of_state(state), expected.step([(of[0], kernel, of[1])]), f"step {step}")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Each device has a part of the rows, the same on both devices of "tp": the mean of eight fractions."""
    (x,), kernel, (grad,) = tensors(6)
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    recipe = dataclasses.replace(RECIPE, pipeline_axes=())

    def local(state, kernel, x, grad):
        def loss(state):
            return jnp.vdot(jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=recipe, state=state), grad)

        return jax.grad(loss)(state)

    specs = P(), P(), P("data"), P("data")
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    expected = Expected().step([(x, kernel, grad)])
    got = of_state(jax.jit(step)(counted_state(), kernel, x, grad))
    for name in OPERANDS:
        oracle.assert_bitwise(got(name), expected[name], name)
