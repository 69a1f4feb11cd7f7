"""`python -m tests.bad_days`: every bad day for jaxfp8 and for Flax's own FP8, side by
side.

Each library runs in a process of its own; where that dies or hangs, the row is a crash
and the next one goes on in a new process. The exit status is 1 if a row of jaxfp8 is
not right.
"""

import argparse
import collections
import concurrent.futures
import importlib.metadata
import json
import multiprocessing
import pathlib
import platform
import sys

from tests import conftest as conftest  # eight CPU devices; `import oracle`

from . import worker
from .libraries import LIBRARIES
from .rows import BY_NAME, IN_ORDER, SUBJECTS
from .verdict import Outcome, Verdict

SPAWN = multiprocessing.get_context("spawn")
SECONDS = 240  # for one row


def verdicts(
    library: str, names: list[str], big: bool, said=lambda name, found: None
) -> dict[str, Verdict]:
    """Of the rows with these names, for one library."""
    found = {}
    process = None
    for name in names:
        if process is None:
            pipe, end = SPAWN.Pipe()
            process = SPAWN.Process(target=worker.work, args=(end, library, big))
            process.start()
            end.close()
        pipe.send(name)
        try:
            if not pipe.poll(SECONDS):
                process.kill()
            found[name] = pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            found[name] = Verdict(Outcome.CRASH, f"exit status {process.exitcode}")
            process = None
        said(name, found[name])
    if process is not None:
        pipe.close()
        process.join()
    return found


def table(results: dict[str, dict[str, Verdict]]) -> str:
    """Markdown: a table for each subject, then the counts."""
    lines = []
    for subject, title in SUBJECTS.items():
        rows = [
            row
            for row in IN_ORDER
            if row.subject == subject and row.name in next(iter(results.values()))
        ]
        if not rows:
            continue
        names = [LIBRARIES[library].name for library in results]
        lines += [
            f"## {title}",
            "",
            f"| row | {' | | '.join(names)} | |",
            "|---" * (1 + 2 * len(names)) + "|",
        ]
        for row in rows:
            cells = [row.title.replace("|", r"\|")]
            for found in results.values():
                verdict = found[row.name]
                outcome = verdict.outcome.value
                cells += [
                    outcome if verdict.outcome is Outcome.RIGHT else f"**{outcome}**",
                    verdict.measured.replace("|", r"\|")
                    .replace("<", "&lt;")
                    .replace("\n", " "),
                ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "## Counts",
        "",
        "| | " + " | ".join(outcome.value for outcome in Outcome) + " |",
    ]
    lines.append("|---" * (1 + len(Outcome)) + "|")
    for library, found in results.items():
        counts = collections.Counter(verdict.outcome for verdict in found.values())
        lines.append(
            f"| {LIBRARIES[library].name} | "
            + " | ".join(str(counts[o]) for o in Outcome)
            + " |"
        )
    return "\n".join(lines)


def environment() -> str:
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("jax", "jaxlib", "flax", "optax", "numpy")
    ]
    return ", ".join([f"Python {platform.python_version()}", *versions])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bad_days", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--only", metavar="TEXT", help="rows whose name, title or subject has this"
    )
    parser.add_argument(
        "--libraries", nargs="+", choices=LIBRARIES, default=["jaxfp8", "flax"]
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the verdicts there too"
    )
    parser.add_argument(
        "--big", action="store_true", help="with the row that takes 12 GiB"
    )
    options = parser.parse_args(arguments)
    wanted = (options.only or "").lower()
    names = [
        r.name
        for r in IN_ORDER
        if any(wanted in text.lower() for text in (r.name, r.title, r.subject))
    ]
    if not names:
        parser.error(
            "--only: expected a part of a row's name, title or subject, got "
            f"{options.only!r}"
        )

    def run(library):
        def said(name, found):
            done = (
                f"{LIBRARIES[library].name}: {BY_NAME[name].title}: "
                f"{found.outcome.value}: {found.measured}"
            )
            print(done[:160], file=sys.stderr, flush=True)

        return verdicts(library, names, options.big, said)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = dict(
            zip(options.libraries, pool.map(run, options.libraries), strict=True)
        )
    print(environment(), table(results), sep="\n\n")
    if options.json:
        record = {
            library: {
                name: {"outcome": v.outcome.value, "measured": v.measured}
                for name, v in found.items()
            }
            for library, found in results.items()
        }
        options.json.write_text(
            json.dumps({"environment": environment(), "verdicts": record}, indent=1)
        )
    passing = (Outcome.RIGHT, Outcome.NOT_RUN)
    return int(
        any(v.outcome not in passing for v in results.get("jaxfp8", {}).values())
    )


if __name__ == "__main__":
    sys.exit(main())
