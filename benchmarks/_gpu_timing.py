"""Timing on a device: programs of several repetitions, dispatched many times without waiting, waited for once.

A program holds `repetitions` of a step, each on inputs of its own, so that together they are larger than the L2 cache.
Barriers chain them: each waits for the results of the one before, and all results are returned, so none is shared, run
beside another one or left out. Dispatching several programs before waiting keeps the host out of the time, unless
dispatch itself is slower than the device, which is what a user would see as well. Candidates take turns (_timing.py).
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import _timing
import jax
from _hlo_gemms import gemms
from jax import lax

TURN_SECONDS = 0.06
_TARGET = 'custom_call_target="jaxfp8_'


@dataclasses.dataclass
class Candidate:
    """One thing to time.

    Attributes:
        call: starts the steps.
        repetitions: steps of one call.
        facts: what to know beside the time: GEMMs by kind, custom calls of ours, memory, options.
        wait: for what `call` returned, and so for all calls before.
    """

    call: Callable
    repetitions: int = 1
    facts: dict = dataclasses.field(default_factory=dict)
    wait: Callable = jax.block_until_ready


def program(step, argument_sets, options=None) -> Candidate:
    """`step` on each of the argument sets, as one compiled program.

    Args:
        step: function of arrays.
        argument_sets: list of tuples of arrays, all of the same shapes.
        options: XLA's compiler options, as `jax.jit(compiler_options=)` takes them.
    """

    def run(argument_sets):
        results = []
        for arguments in argument_sets:
            if results:
                arguments, results[-1] = lax.optimization_barrier((arguments, results[-1]))
            results.append(step(*arguments))
        return results

    compiled = jax.jit(run).lower(argument_sets).compile(compiler_options=options)
    repetitions = len(argument_sets)
    text = compiled.as_text()
    facts = {"gemms": gemms(text, repetitions), "custom_calls": text.count(_TARGET) / repetitions}
    facts |= {"options": options} if options else {}
    return Candidate(lambda: compiled(argument_sets), repetitions, facts)


def measure(candidates: dict[str, Candidate], turns: int, turn_seconds: float = TURN_SECONDS) -> dict[str, dict]:
    """name -> `us` of one step, `spread`, how often it ran, and its facts; a candidate's turn takes `turn_seconds`."""
    loops = {}
    for name, candidate in candidates.items():
        for _ in range(2):
            candidate.wait(candidate.call())
        start = time.perf_counter()
        candidate.wait(candidate.call())
        taken = time.perf_counter() - start
        loops[name] = max(1, min(500, math.ceil(turn_seconds / taken))) if turns > 1 else 1

    def loop_of(name):
        def loop():
            for _ in range(loops[name]):
                result = candidates[name].call()
            candidates[name].wait(result)

        return loop

    timings = _timing.interleaved({name: loop_of(name) for name in candidates}, turns=max(turns, 2), warmups=0)
    rows = {}
    for name, timing in timings.items():
        steps = loops[name] * candidates[name].repetitions
        rows[name] = {
            "us": 1e6 * statistics.median(timing.seconds) / steps,
            "spread": timing.spread,
            "steps_a_turn": steps,
            **candidates[name].facts,
        }
    return rows


def attempt(candidates: dict, errors: dict, name: str, make) -> None:
    """Adds a candidate, or notes why there is none: a peer that does not run must not end the benchmark."""
    try:
        candidates[name] = make()
    except Exception as error:  # whatever a peer raises
        errors[name] = f"{type(error).__name__}: {error}"[:500]
