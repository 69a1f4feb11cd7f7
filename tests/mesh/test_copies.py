"""Copies that never train on meshes: the scale of each tensor is that of the whole
tensor, as on one device.
"""

import jax
import numpy as np
import pytest
from inference.test_copies import (
    BOUND,
    CASES,
    INPUTS,
    RECIPE,
    empty,
    error,
    kernels,
    layers,
    layers_in_float32,
    members,
    product,
)
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
from mesh import cases

# How x [m, k] and the kernel [k, n] are cut.
LAYOUTS = {
    "data": (P(cases.AXES), P()),
    "fsdp": (P(cases.AXES), P(cases.AXES, None)),
    "columns": (P("data"), P(None, ("fsdp", "tp"))),
    "contracted": (P("data", "tp"), P("tp", "fsdp")),
}
LAYERS = pytest.mark.parametrize("layout", LAYOUTS)


def placed(mesh, layout, x, kernel, state):
    """The arrays on the mesh; leading dimensions are whole."""
    of_x, of_kernel = LAYOUTS[layout]
    of_kernel = P(*[None] * (kernel.ndim - 2), *of_kernel)
    x, kernel = (
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in ((x, of_x), (kernel, of_kernel))
    )
    return x, kernel, jax.device_put(state, NamedSharding(mesh, P()))


def check(y, function, x, kernel, state):
    """The error is that of rounding, and the codes are those of one device: sums may
    differ in order.
    """
    exact = FLOAT32[function](x.astype(np.float64), kernel.astype(np.float64))
    assert error(y, exact) < BOUND
    np.testing.assert_allclose(
        y, jax.jit(function)(x, kernel, state), rtol=1e-4, atol=1e-5 * np.abs(y).max()
    )


FLOAT32 = {product: np.matmul, members: np.matmul, layers: layers_in_float32}


@CASES
@LAYERS
@pytest.mark.parametrize("function", FLOAT32)
def test_jit(function, layout, case):
    count = () if function is product else (2,)
    arguments = INPUTS[case], kernels(case, *count), empty(*count)
    check(
        jax.jit(function)(*placed(cases.mesh("auto"), layout, *arguments)),
        function,
        *arguments,
    )


@CASES
@pytest.mark.parametrize("layout", ["data", "columns"])
def test_explicit_axes(layout, case):
    arguments = (INPUTS[case], kernels(case), empty())
    mesh = cases.mesh("explicit")
    with jax.set_mesh(mesh):
        y = jax.jit(product)(*placed(mesh, layout, *arguments))
    check(y, product, *arguments)


@CASES
@LAYERS
@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.filterwarnings("ignore::jaxfp8.FP8StateWarning")
def test_shard_map(checked, layout, case):
    arguments = (INPUTS[case], kernels(case), empty())
    mesh = cases.mesh("auto")
    of_x, of_kernel = LAYOUTS[layout]
    summed = of_x[1:] and of_x[1]

    def on_device(x, kernel, state):
        kernel = (
            lax.all_gather(kernel, cases.AXES, axis=0, tiled=True)
            if layout == "fsdp"
            else kernel
        )
        y = product(x, kernel, state)
        return lax.psum(y, summed) if summed else y

    out = P(
        of_x[0],
        None if layout == "fsdp" else (*of_kernel, None)[1] if len(of_kernel) else None,
    )
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(of_x, of_kernel, P()),
        out_specs=out,
        check_vma=checked,
    )
    check(jax.jit(run)(*placed(mesh, layout, *arguments)), product, *arguments)


@CASES
@pytest.mark.parametrize("checked", [True, False], ids=["check_vma", "no check_vma"])
@pytest.mark.filterwarnings("ignore::jaxfp8.FP8StateWarning")
def test_codes_on_the_wire(checked, case):
    """A transfer without a backward."""

    def on_device(x, state):
        return jaxfp8.collectives.all_gather(
            x, "data", recipe=RECIPE, state=state, tiled=True
        ).source

    specs = {
        "mesh": cases.mesh("auto"),
        "in_specs": (P("data"), P()),
        "out_specs": P("data"),
    }
    run = jax.shard_map(on_device, **specs, check_vma=checked)
    x = kernels(case) if case == "small kernel" else INPUTS[case]
    gathered = jax.jit(run)(x, empty())
    assert error(gathered, np.concatenate([x, x])) < BOUND
