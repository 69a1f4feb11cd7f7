"""Mutants of what happens over a mesh: each must make the comparison with one device
fail; the package must not.

They are wrong, not ill-typed: where types show which devices agree, JAX itself would
refuse a reduction that is left out.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mesh import cases, pipelines, test_shard_map

from jaxfp8._jax import _mesh
from jaxfp8.ops import _partition
from jaxfp8.recipes import AmaxReduction

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")

STEPS = 2


@pytest.fixture(scope="module", autouse=True)
def references():
    """Before there are mutants."""
    return pipelines.reference(), cases.reference(steps=STEPS)


def pipeline(name):
    run = pipelines.run(pipelines.PROGRAMS[name])
    cases.assert_same(run, pipelines.reference(), name)


def shards(layout_name, checked):
    mesh, layout = cases.mesh(), cases.LAYOUTS[layout_name]
    run = test_shard_map.train(
        test_shard_map.step_inside(mesh, layout, checked), mesh, layout, steps=STEPS
    )
    cases.assert_same(run, cases.reference(steps=STEPS), layout_name)


def of_one_device(x, axes):
    """`x` of the first device along `axes`, as if all had agreed on it."""
    if not axes:
        return x
    is_first = sum(lax.axis_index(axis) for axis in axes) == 0
    return lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axes)


def differing(amax, state, reduction):
    """The axes to reduce over."""
    if reduction.axes is not None:
        return reduction.axes
    return tuple(sorted(_mesh.varying(amax) - _mesh.varying(*jax.tree.leaves(state))))


def reduction(function):
    """Another `amax, axes -> amax`."""

    def mutant(self, amax, state):
        return function(amax, differing(amax, state, self))

    return attribute(AmaxReduction, "__call__", lambda _: mutant)


def nothing(amax, axes):
    return of_one_device(amax, axes) if _mesh.varying(amax) else amax


def one_axis(amax, axes):
    return of_one_device(lax.pmax(amax, axes[:1]), axes[1:]) if axes else amax


def over_stages(original):
    def mutant(self, amax, state):
        amax = original(self, amax, state)
        own = tuple(_mesh.varying(*jax.tree.leaves(state)))
        if self.axes is not None:
            return lax.pmax(amax, self.pipeline_axes)
        return (
            lax.pcast(lax.pmax(amax, own), own, to="varying")
            if set(own) <= _mesh.varying(amax)
            else amax
        )

    return mutant


def over_stages_in_jit(original):
    def mutant(mesh, axes, named, combine):
        return (
            mesh.axis_names
            if combine is lax.pmax and named[-1] == "one"
            else original(mesh, axes, named, combine)
        )

    return mutant


def gradient(function):
    """Another `ct, axes -> ct` for what is replicated."""

    def mutant(original):
        def wrong(aval, ct):
            axes = tuple(sorted(_mesh.varying(ct) - _mesh.varying(aval)))
            return function(ct, axes) if axes else original(aval, ct)

        return wrong

    return attribute(_mesh, "cotangent_of", mutant)


IN_JIT = attribute(_partition, "_reduced_over", over_stages_in_jit)
OVER_STAGES = attribute(AmaxReduction, "__call__", over_stages)
MUTANTS = {
    "over the stages, jit": (IN_JIT, pipeline, "vmap"),
    "over the stages, types": (OVER_STAGES, pipeline, "shard_map"),
    "forgotten, types": (reduction(nothing), shards, "all", True),
    "forgotten, no types": (reduction(nothing), shards, "all", False),
    "forgotten, pipeline, no types": (
        reduction(nothing),
        pipeline,
        "shard_map, no check_vma",
    ),
    "sum, no types": (reduction(lax.psum), shards, "dp", False),
    "over one axis, types": (reduction(one_axis), shards, "dp", True),
    "gradient of one device": (gradient(of_one_device), shards, "dp", True),
    "mean gradient": (gradient(lax.pmean), shards, "tp", True),
}


@pytest.mark.parametrize(
    "install, check, arguments",
    [(i, c, a) for i, c, *a in MUTANTS.values()],
    ids=MUTANTS,
)
def test_mutant_is_caught(install, check, arguments, monkeypatch):
    install(monkeypatch)
    with pytest.raises(AssertionError):
        check(*arguments)
