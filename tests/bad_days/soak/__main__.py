"""`python -m tests.bad_days.soak --steps 500 --seed 0`: exit status 1 at the first bit
that differs from numpy.
"""

import argparse
import sys
import time

from tests import conftest as conftest  # eight CPU devices; `import oracle`

from . import program
from .run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_days.soak")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.monotonic()

    def said(step, counts):
        if (step + 1) % 50 == 0:
            print(
                f"step {step + 1}: the bits of numpy ({time.monotonic() - start:.0f} "
                "s)",
                flush=True,
            )

    try:
        counts = soak(program.events(options.steps, options.seed), said)
    except AssertionError as error:
        print(f"seed {options.seed}, {error}")
        return 1
    print(
        f"seed {options.seed}:",
        ", ".join(f"{count} {name}" for name, count in counts.items()),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
