"""Random calls in a process that may die: `python -m tests.bad_days.fuzz.worker FIRST STEP SECONDS`.

Seeds are FIRST, FIRST + STEP, and so on; even ones go to the handlers, odd ones to the ops. It prints a seed before the
call, and what came of it after.
"""

import gc
import sys
import time

import jax

from tests import conftest as conftest  # eight CPU devices; `import oracle`

from . import ops, targets


def one(seed: int) -> str:
    """ "right", "refused", "nothing to see"; or a finding, which starts with FINDING."""
    try:
        return (ops if seed % 2 else targets).check(seed)
    except Exception as error:  # also what no call should raise
        return f"FINDING {type(error).__name__}: {error}".replace("\n", " ")


def main(first, step, seconds):
    end, seed = time.monotonic() + seconds, first
    while time.monotonic() < end:
        print("begins", seed, flush=True)
        print("gives", seed, one(seed), flush=True)
        seed += step
        if seed % (100 * step) < step:  # programs of random shapes are never used again
            jax.clear_caches()
            gc.collect()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
