"""Timing on a device: programs of several repetitions, dispatched many times without
waiting, waited for once.

A program holds `repetitions` of a step, each on inputs of its own, so that all inputs
are larger than the L2 cache. Barriers chain the repetitions: each waits for the results
of the one before, and all results are returned, so that XLA shares none, runs no two
side by side, and drops none. Results are written over those of the call before, as
those of a training step are: XLA updates its graph where a buffer has moved, which
takes long for custom calls. Dispatching several programs before waiting keeps the host
out of the time, unless dispatch itself is slower than the device, which a user would
see as well. Candidates take turns (_timing.py).
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import _timing
import jax
import jax.numpy as jnp
from _hlo_gemms import gemms
from jax import lax

TURN_SECONDS = 0.06
_TARGET = 'custom_call_target="jaxfp8_'


@dataclasses.dataclass
class Candidate:
    """A program to time.

    Attributes:
        call: a function that starts the steps.
        repetitions: the number of steps in one call.
        facts: facts for the row beside the time: GEMMs by kind, jaxfp8's custom calls,
            memory, options.
        wait: a function that waits for a result of `call`, and so for all calls before.
    """

    call: Callable
    repetitions: int = 1
    facts: dict = dataclasses.field(default_factory=dict)
    wait: Callable = jax.block_until_ready


def program(step, argument_sets, options=None) -> Candidate:
    """Compile `step` on each of the argument sets as one program.

    Args:
        step: a function of arrays.
        argument_sets: a list of tuples of arrays, all of the same shapes.
        options: XLA's compiler options, as `jax.jit(compiler_options=)` takes them.
    """

    def run(argument_sets, results_before):
        del results_before  # donated
        results = []
        for arguments in argument_sets:
            if results:
                arguments, results[-1] = lax.optimization_barrier(
                    (arguments, results[-1])
                )
            results.append(step(*arguments))
        return results

    shapes = [jax.eval_shape(step, *arguments) for arguments in argument_sets]
    before = jax.tree.map(lambda result: jnp.zeros(result.shape, result.dtype), shapes)
    jitted = jax.jit(run, donate_argnums=1, keep_unused=True)
    compiled = jitted.lower(argument_sets, before).compile(compiler_options=options)
    repetitions = len(argument_sets)
    text = compiled.as_text()
    facts = {
        "gemms": gemms(text, repetitions),
        "custom_calls": text.count(_TARGET) / repetitions,
    }
    facts |= {"options": options} if options else {}

    def call():
        nonlocal before
        before = compiled(argument_sets, before)
        return before

    return Candidate(call, repetitions, facts)


def measure(
    candidates: dict[str, Candidate], turns: int, turn_seconds: float = TURN_SECONDS
) -> dict[str, dict]:
    """Time candidates in turns of about `turn_seconds`.

    Returns:
        For each candidate `us` of a step, `spread`, `steps_a_turn`, and its facts.
    """
    loops = {}
    for name, candidate in candidates.items():
        for _ in range(2):
            candidate.wait(candidate.call())
        start = time.perf_counter()
        candidate.wait(candidate.call())
        taken = time.perf_counter() - start
        loops[name] = (
            max(1, min(500, math.ceil(turn_seconds / taken))) if turns > 1 else 1
        )

    def loop_of(name):
        def loop():
            for _ in range(loops[name]):
                result = candidates[name].call()
            candidates[name].wait(result)

        return loop

    timings = _timing.interleaved(
        {name: loop_of(name) for name in candidates}, turns=max(turns, 2), warmups=0
    )
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
    """Add a candidate, or its error: a peer that does not run must not end the
    benchmark.
    """
    try:
        candidates[name] = make()
    except Exception as error:  # a peer may raise anything
        errors[name] = f"{type(error).__name__}: {error}"[:500]
