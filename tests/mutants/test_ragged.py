"""Mutants of ragged_dot, which its tests catch."""

import jax
import jax.numpy as jnp
import pytest
from dot import test_ragged_blocks as test_blocks, test_ragged_dot
from dot.ragged_cases import compare_steps
from mesh import test_ragged as test_meshes
from programs import functional, known_amax

from jaxfp8 import ops
from jaxfp8._jax import _compat
from jaxfp8.dot import _product, _ragged_dot
from jaxfp8.ops import _blocks, _partition

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def test_garbage_that_is_not_masked_is_caught(monkeypatch):
    monkeypatch.setattr(_ragged_dot, "in_a_group", lambda x, sizes: x)
    with pytest.raises(AssertionError):
        compare_steps(steps=2)


@pytest.mark.parametrize("wrong", ["group_sizes", "scale"])
def test_wrong_gemms_are_caught(monkeypatch, wrong):
    original = ops.ragged_matmul

    def mutant(a, b, a_scale_inv, b_scale_inv, group_sizes, **options):
        if wrong == "group_sizes":
            group_sizes = group_sizes[::-1]
        else:  # that of one operand twice
            b_scale_inv = a_scale_inv
        return original(a, b, a_scale_inv, b_scale_inv, group_sizes, **options)

    monkeypatch.setattr(ops, "ragged_matmul", mutant)
    with pytest.raises(AssertionError, match="out of bound"):
        compare_steps(steps=2)  # from the second on, scales are not 1


def test_a_sum_of_states_is_caught(monkeypatch):
    monkeypatch.delattr(_compat.OncePrimitive, "bind_with_trace")
    with pytest.raises(ValueError, match="summed over uses"):
        known_amax.check(
            functional.Ragged,
            functional.RAGGED["loop"],
            differentiate=jax.value_and_grad,
        )


def test_a_sum_over_members_is_caught(monkeypatch):
    monkeypatch.setattr(
        _product,
        "repeat_state",
        lambda size, leaf: jnp.broadcast_to(leaf, (size[0], *leaf.shape)),
    )
    with pytest.raises(TypeError, match="one FP8 state was repeated"):
        test_ragged_dot.test_vmap("rhs and state")


def test_scales_of_other_blocks_are_caught(monkeypatch):
    spread = _blocks.spread
    monkeypatch.setattr(
        _blocks,
        "spread",
        lambda scales, *rest: spread(jnp.roll(scales, 1, axis=-1), *rest),
    )
    with pytest.raises(AssertionError, match="out of bound"):
        test_blocks.compare("block")


@pytest.mark.parametrize("wrong", ["row", "group"])
def test_groups_of_other_shards_are_caught(monkeypatch, wrong):
    """A device that takes itself for the first one, of rows or of experts."""
    original = _partition._cut

    def cut(mesh, axes, name):
        index, shards = original(mesh, axes, name)
        return (0 if name == {"row": "m0", "group": "g0"}[wrong] else index), shards

    monkeypatch.setattr(_partition, "_cut", cut)
    with pytest.raises(AssertionError, match="out of bound"):
        test_meshes.compare_on_mesh(("x", None), ("y", None, None))
