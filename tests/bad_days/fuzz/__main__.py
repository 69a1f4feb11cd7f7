"""`python -m tests.bad_days.fuzz --minutes 5 --seed 0`: random calls of the CPU handlers and the ops, on every core.

A call must give the answer of the oracle or an error that names the op, in a process that lives on. The exit status
is 1 with a finding; `--only SEED` runs one seed again.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[3]
SECONDS = 120  # for one call


def watch(first: int, step: int, end: float, found: list, counts: collections.Counter) -> None:
    """Runs workers until `end`, a new one where one has died or hangs."""
    seed = first
    while (left := int(end - time.monotonic())) > 0:
        with tempfile.TemporaryFile("w+") as errors:
            command = [sys.executable, "-m", "tests.bad_days.fuzz.worker", str(seed), str(step), str(left)]
            worker = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
            running = None
            try:
                for line in worker.stdout:
                    kind, number, *rest = line.rstrip("\n").split(" ", 2)
                    if kind == "begins":
                        running = int(number)
                        continue
                    running, seed = None, int(number) + step
                    outcome = rest[0] if rest else ""
                    counts["finding" if outcome.startswith("FINDING") else outcome] += 1
                    if outcome.startswith("FINDING"):
                        found.append(f"seed {number}: {outcome}")
                code = worker.wait(timeout=SECONDS)
            finally:
                worker.kill()
            if code == 0:
                return
            errors.seek(0)
            counts["crash"] += 1
            found.append(f"seed {running}: the process ended with {code}: {errors.read()[-500:]}")
            if running is None:
                return  # not a call: the worker itself is broken
            seed = running + step


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bad_days.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--only", type=int, metavar="SEED", help="run this call alone, in this process")
    options = parser.parse_args()
    if options.only is not None:
        from .worker import one

        outcome = one(options.only)
        print(outcome)
        return int(outcome.startswith("FINDING"))
    found, counts, end = [], collections.Counter(), time.monotonic() + 60 * options.minutes
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        watches = [
            # A stride that is odd, so that every worker has seeds of both kinds.
            pool.submit(watch, options.seed + i, options.workers | 1, end, found, counts)
            for i in range(options.workers)
        ]
        for each in watches:
            each.result()
    print("\n".join(found[:20]))
    print(f"seeds from {options.seed}:", ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())))
    return int(bool(found) or not counts["right"] or not counts["refused"])


if __name__ == "__main__":
    sys.exit(main())
