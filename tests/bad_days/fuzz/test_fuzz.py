"""Random calls of the CPU handlers, and that the checks see a handler that is wrong.

A call must give the answer of the oracle or an error that names the op. The seeds are
the same in every run; `make test-all` takes others, of the day: `--fuzz FIRST:COUNT`.
Where a call ends its process, pytest-xdist (`-n`) names the seeds and goes on in
another.
"""

import numpy as np
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


def test_a_bad_call_that_is_accepted(monkeypatch):
    """A model that allows nothing, where the handlers do."""
    monkeypatch.setattr(targets, "answer", lambda call: None)
    with pytest.raises(AssertionError, match="a bad call is accepted"):
        for seed in SEEDS:
            targets.check(seed)


def test_mutants_of_handlers_are_found(monkeypatch):
    """What comes back from the handlers, changed in one bit of one element."""

    def spoilt(call, original=targets.run):
        outputs = original(call)
        for i, out in enumerate(outputs):
            raw = np.array(out).reshape(-1).view(np.uint8)
            if raw.size:
                raw[0] ^= 1
                return [
                    *outputs[:i],
                    raw.view(out.dtype).reshape(out.shape),
                    *outputs[i + 1 :],
                ]
        return outputs

    monkeypatch.setattr(targets, "run", spoilt)
    with pytest.raises(AssertionError, match="differ"):
        for seed in SEEDS:
            targets.check(seed)
