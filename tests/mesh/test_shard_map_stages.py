"""Stages of a pipeline in `shard_map`: each has a state of its own, and `pipeline_axes`
says along which axis.
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfp8
from mesh import cases

from .test_shard_map import CURRENT, RECIPE, step_inside, train

# pipelines.py has stages with a state
STAGED = {
    "current": dataclasses.replace(CURRENT, pipeline_axes=("stage",)),
    "without state": dataclasses.replace(RECIPE, pipeline_axes=("stage",)),
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", STAGED)
def test_stages_scale_by_themselves(name, checked):
    """All stages see the same x, each with a kernel of another size: each is as if it
    were alone.

    All amaxes are 7 times a power of two and all sums exact. With a scale for all
    kernels the small ones would be 0.
    """
    recipe = STAGED[name]
    stages = 4
    rng = np.random.default_rng(0)
    x, grad = (
        np.append(rng.integers(-6, 7, 16 * 8 - 1), 7).astype(np.float32).reshape(16, 8)
        for _ in range(2)
    )
    kernels = rng.integers(-6, 7, (stages, 8, 8)).astype(np.float32)
    kernels[:, 0, 0] = 7
    kernels *= np.float32([[[1]], [[2]], [[2**12]], [[2**-6]]])

    def gradient(kernel, state, x, grad):
        y, vjp = jax.vjp(
            lambda *args: jaxfp8.dot_general(
                x, args[0], cases.MATMUL, recipe=recipe, state=args[1]
            ),
            kernel,
            state,
        )
        return y, vjp(grad)

    def of_stage(kernels, states, x, grad):
        kernel, state = jax.tree.map(lambda leaf: leaf[0], (kernels, states))
        grad = lax.pcast(grad, "stage", to="varying") if checked else grad
        y, (of_kernel, of_state) = gradient(kernel, state, x, grad)
        of_kernel = of_kernel if checked else lax.psum(of_kernel, "data")
        return jax.tree.map(lambda leaf: leaf[None], (y, (of_kernel, of_state)))

    state = (
        cases.stateless()["w1"]
        if name == "without state"
        else jaxfp8.init_state(recipe)
    )
    wanted = [jax.jit(gradient)(kernel, state, x, grad) for kernel in kernels]
    wanted = jax.tree.map(lambda *leaves: np.stack(leaves), *wanted)
    states = cases.stacked(state, stages)
    mapped = jax.shard_map(
        of_stage,
        mesh=cases.mesh(shape=(stages, 2), axes=("stage", "data")),
        in_specs=(P("stage"), P("stage"), P("data"), P("data")),
        out_specs=(P("stage", "data"), (P("stage"), P("stage"))),
        check_vma=checked,
    )
    cases.assert_same(jax.jit(mapped)(kernels, states, x, grad), wanted, name)


@pytest.mark.parametrize(
    "axis, checked, message",
    [
        ("fsdp", True, r"names \['fsdp'\], but the state does not vary over it"),
        # where types do not tell, a typo would reduce over the stages
        ("stages", False, ": expected axes of this shard_map.*stages"),
    ],
)
def test_bad_pipeline_axes(axis, checked, message):
    recipe = dataclasses.replace(cases.RECIPE, pipeline_axes=(axis,))
    mesh = cases.mesh()
    layout = cases.LAYOUTS["dp"]
    with pytest.raises(ValueError, match=f"pipeline_axes.?{message}"):
        train(step_inside(mesh, layout, checked, recipe), mesh, layout, steps=1)
