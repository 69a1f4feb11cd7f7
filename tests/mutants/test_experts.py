"""Mutants of Experts, which its tests catch."""

import jax.numpy as jnp
import pytest
from linen.test_experts import compare_with_loop

from jaxfp8.dot import _experts

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


def _with_all_rows(original):
    """Tokens of no expert go to the last one."""

    def mutant(expert, count):
        return original(
            jnp.where((expert < 0) | (expert >= count), count - 1, expert), count
        )

    return mutant


MUTANTS = {
    "not restored": ("_restored", _not_restored),
    "without weights": ("_weighted_sum", _without_weights),
    "sizes of the next expert": (
        "_sorted",
        _with_sizes_of_the_next_expert(_experts._sorted),
    ),
    "no expert is the last": ("_sorted", _with_all_rows(_experts._sorted)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(monkeypatch, mutant):
    name, function = MUTANTS[mutant]
    monkeypatch.setattr(_experts, name, function)
    case = "no expert" if mutant == "no expert is the last" else "two"
    with pytest.raises(AssertionError):
        compare_with_loop(case)
