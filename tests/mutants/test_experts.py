"""Mutants of Experts, which its tests catch."""

import jax.numpy as jnp
import pytest
from linen.test_experts import compare_with_loop
from mesh import test_experts as on_a_mesh

from jaxfp8.collectives import _experts as exchanged
from jaxfp8.dot import _experts

from . import attribute

pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def _not_restored(rows, order):
    del order
    return rows


def _without_weights(y, weights):
    del weights
    return jnp.sum(y, axis=-2)


def _with_sizes_of_the_next_expert(original):
    def mutant(expert, count):
        order, group_sizes = original(expert, count)
        return order, jnp.roll(group_sizes, 1)

    return mutant


MUTANTS = {
    "not restored": (_experts, "restored", _not_restored),
    "without weights": (_experts, "_weighted_sum", _without_weights),
    "sizes of the next expert": (
        _experts,
        "sorted_by_expert",
        _with_sizes_of_the_next_expert(_experts.sorted_by_expert),
    ),
    "rows of no expert are not zeros": (
        _experts.Route,
        "_of_experts",
        lambda self, rows: rows,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    monkeypatch.setattr(*MUTANTS[mutant])
    case = "no expert" if "no expert" in mutant else "two"
    with pytest.raises(AssertionError):
        compare_with_loop(case)


def _of_transfers(change):
    """`transfer` with another part of the state."""

    def mutant(original):
        return lambda *args: original(*args[:-1], change(args[-1]))

    return attribute(exchanged, "transfer", mutant)


ON_A_MESH = {
    "the transfer records the gradient of tokens": _of_transfers(
        lambda part: None if part == "input" else part
    ),
    "the product records codes": attribute(
        exchanged,
        "ragged_product",
        lambda original: (
            lambda *args, records_grad=True, **options: original(*args, **options)
        ),
    ),
    "rows as they arrive": attribute(
        exchanged, "permuted", lambda _: lambda rows, order: rows
    ),
}


@pytest.mark.parametrize("mutant", ON_A_MESH)
def test_mutants_on_a_mesh_are_caught(monkeypatch, mutant):
    ON_A_MESH[mutant](monkeypatch)
    on_a_mesh.of_linen.cache_clear()
    with pytest.raises(AssertionError):
        on_a_mesh.compare_with_one_device()
    on_a_mesh.of_linen.cache_clear()
