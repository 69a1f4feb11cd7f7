"""A soak in small, long ones, and mutants that it must see."""

import pytest

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
