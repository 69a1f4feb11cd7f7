"""Random calls of the CPU handlers.

A call must give the answer of the oracle or an error that names the op. The seeds are
the same in every run; `make test-all` takes others, of the day: `--fuzz FIRST:COUNT`.
Where a call ends its process, pytest-xdist (`-n`) names the seeds and goes on in
another.
"""

import pytest

from . import targets

# Calls of every target, good ones and bad ones.
SEEDS = range(40)


# programs of random shapes are of no use later
pytestmark = pytest.mark.usefixtures("nothing_stays_traced")


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("fuzz")
        blocks = [
            range(i, i + len(SEEDS)) for i in range(first, first + count, len(SEEDS))
        ]
        metafunc.parametrize(
            "seeds", blocks, ids=lambda seeds: f"{seeds.start}:{len(seeds)}"
        )


def test_random_calls(seeds):
    outcomes = set()
    for seed in seeds:
        try:
            outcomes.add(targets.check(seed))
        except Exception as error:  # also what no call should raise
            error.add_note(f"This was seed {seed}.")
            raise
    assert {"right", "refused"} <= outcomes
