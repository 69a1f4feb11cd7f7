"""A soak in small, long ones, and mutants that it must see."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8
from jaxfp8 import mixed_precision
from jaxfp8.numerics import _scaling

from . import program, run

HAPPENS = (
    *program.KINDS,
    *program.TRAINERS,
    "saved",
    "restored",
    "mesh changes",
    "skipped",
)


def test_a_short_run_in_which_everything_happens():
    """Bitwise numpy at every step; `soak` says at which one it is not."""
    counts = run.soak(program.scripted())
    assert counts["steps"] == len(program.SCRIPT) and all(
        counts[what] for what in HAPPENS
    ), counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_five_hundred_steps(seed):
    counts = run.soak(program.events(500, seed))
    assert counts["steps"] == 500 and all(
        counts[what] > 5 for what in (*HAPPENS, *program.MESHES)
    ), counts


def added(acc, grads):
    return grads if acc is None else jax.tree.map(jnp.add, acc, grads)


def late(old, new):
    """The scale of the step before."""
    return {name: layer if name == "w1" else old[name] for name, layer in new.items()}


MUTANTS = {
    "NaN into the history": (_scaling, "clean", lambda history: history),
    "sum for max over microbatches": (jaxfp8, "accumulate_gradients", added),
    "nothing is skipped": (mixed_precision, "select", lambda finite, new, old: new),
    "one layer's state is not updated": (jaxfp8, "update_state", late),
    "a checkpoint that gives the tree as it is": (
        run.Checkpoints,
        "restore",
        lambda self, like: (like, self.last[1]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("owner, name, mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_seen(owner, name, mutant, monkeypatch):
    monkeypatch.setattr(owner, name, mutant)
    jax.clear_caches()
    try:
        with pytest.raises((AssertionError, ValueError)):
            run.soak(program.scripted())
    finally:
        jax.clear_caches()
