"""Random calls of the CPU handlers and the ops, and that the checks see a handler or an op that is wrong.

A call must give the answer of the oracle or an error that names the op. The seeds are the same in every run;
`make test-all` takes others, of the day: `--fuzz FIRST:COUNT`. Where a call ends its process, pytest-xdist (`-n`) names
the seeds and goes on in another.
"""

import numpy as np
import pytest

import jaxfp8

from . import ops as fuzzed_ops, targets

# Calls of every target and op, good ones and bad ones.
SEEDS = range(40)


pytestmark = pytest.mark.usefixtures("nothing_stays_traced")  # programs of random shapes are of no use later


def pytest_generate_tests(metafunc):
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.getoption("fuzz")
        blocks = [range(i, i + len(SEEDS)) for i in range(first, first + count, len(SEEDS))]
        metafunc.parametrize("seeds", blocks, ids=lambda seeds: f"{seeds.start}:{len(seeds)}")


@pytest.mark.parametrize("calls", [targets, fuzzed_ops], ids=["handlers", "ops"])
def test_random_calls(calls, seeds):
    outcomes = set()
    for seed in seeds:
        try:
            outcomes.add(calls.check(seed))
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


MUTANTS = {
    "an op that gives other codes": ("quantize", lambda x, scale, dtype: jaxfp8.ops.quantize(-x, scale, dtype)),
    "an op that refuses what is good": ("amax", lambda x: jaxfp8.ops.amax(x.astype(np.int32))),
    "an op that takes anything": ("dequantize", lambda data, scale, dtype: np.zeros(3, np.float32)),
    "an error without a name": ("scaled_matmul", lambda *_, **__: (_ for _ in ()).throw(TypeError("no"))),
}


@pytest.mark.parametrize("op, mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutants_of_ops_are_found(op, mutant, monkeypatch):
    class Ops:
        """jaxfp8.ops with one op replaced."""

        def __getattr__(self, name):
            return mutant if name == op else getattr(jaxfp8.ops, name)

    monkeypatch.setattr(fuzzed_ops, "ops", Ops())
    monkeypatch.setattr(fuzzed_ops, "CALLS", {op: fuzzed_ops.CALLS[op]})
    with pytest.raises((AssertionError, AttributeError)):
        for seed in range(20):
            fuzzed_ops.check(seed)


def test_mutants_of_handlers_are_found(monkeypatch):
    """What comes back from the handlers, changed in one bit of one element."""

    def spoilt(call, original=targets.run):
        outputs = original(call)
        for i, out in enumerate(outputs):
            raw = np.array(out).reshape(-1).view(np.uint8)
            if raw.size:
                raw[0] ^= 1
                return [*outputs[:i], raw.view(out.dtype).reshape(out.shape), *outputs[i + 1 :]]
        return outputs

    monkeypatch.setattr(targets, "run", spoilt)
    with pytest.raises(AssertionError, match="differ"):
        for seed in SEEDS:
            targets.check(seed)
