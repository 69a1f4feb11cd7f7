"""The timing protocol of every benchmark: candidates take turns, and a time is a median
over the turns.

Turns make drift of the machine (clock, neighbours) hit all candidates alike, so ratios
of one run can be trusted where times of two runs cannot. A turn is two calls, of which
the second is timed: XLA gives a program's temporary memory back only after its results
are ready, and that should slow only the candidate itself. A call is timed until its
results are ready. The results are freed before the next call, so that the allocator can
hand out the same pages again ("warm heap"). Above 32 MiB glibc returns pages to the
system instead, and every call pays for fresh pages.
"""

import dataclasses
import statistics
import time

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of the calls of one candidate: elapsed, and CPU time of all threads,
    which neighbours disturb less.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The distance of the quartiles, relative to the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median

    def times_faster(self, peer: "Timing") -> float:
        """Return the median over turns of the peer's time divided by this candidate's
        time in the same turn.
        """
        return statistics.median(
            theirs / ours
            for theirs, ours in zip(peer.seconds, self.seconds, strict=True)
        )


def _turn(call) -> tuple[float, float]:
    jax.block_until_ready(call())
    start, cpu_start = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - start, time.process_time() - cpu_start


def interleaved(candidates, *, turns: int = 15, warmups: int = 2) -> dict[str, Timing]:
    """Time candidates in turns.

    Args:
        candidates: a dict name -> function without arguments, whose result is waited
            for.
        turns: the number of timed calls of each candidate.
        warmups: the number of calls of each before the first timed call (compilation,
            first touch of pages).

    Returns:
        A dict name -> Timing.
    """
    for call in candidates.values():
        for _ in range(warmups):
            jax.block_until_ready(call())
    taken = {name: [] for name in candidates}
    for _ in range(turns):
        for name, call in candidates.items():
            taken[name].append(_turn(call))
    return {name: Timing(*zip(*values, strict=True)) for name, values in taken.items()}


def shortlist(candidates, *, keep: int, turns: int = 3):
    """Time candidates in a short first round, so that the long round spends no time on
    slow candidates.

    Returns:
        The `keep` fastest candidates, and a dict name -> seconds of the best turn, of
        all candidates.
    """
    timings = interleaved(candidates, turns=turns, warmups=1)
    best = {name: min(timing.seconds) for name, timing in timings.items()}
    return {name: candidates[name] for name in sorted(best, key=best.get)[:keep]}, best
