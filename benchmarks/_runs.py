"""Paired training runs: the texts, and one file with a line of JSON a run, where what
is there is not run again.
"""

import json
import pathlib
import sys

import optax
from _compare_corpus import Corpus
from _environment import environment

TEXTS = ("manual", "source")


def corpora() -> dict[str, Corpus]:
    """The texts: one ships with Python, the other with optax (Apache License 2.0)."""
    files = sorted(pathlib.Path(optax.__file__).parent.rglob("*.py"))
    source = "".join(
        file.read_text(encoding="utf-8")
        for file in files
        if not file.stem.endswith("_test")
    )
    return dict(zip(TEXTS, (Corpus(), Corpus(source)), strict=True))


def found_runs(path: pathlib.Path, steps: int) -> dict:
    """What the file has of all runs of that many steps, by key."""
    if not path.exists():
        return {}
    runs = map(json.loads, path.read_text().splitlines())
    return {
        (run["text"], run["arm"], run["seed"]): run
        for run in runs
        if run["steps"] == steps
    }


def run_missing(path: pathlib.Path, keys, steps: int, run) -> dict:
    """Run what is missing in the file; return what it has of all these runs, by key.

    Args:
        path: of the file, JSON lines; each run adds one.
        keys: `(text, arm, seed)`, in the order to run them.
        steps: of a run.
        run: `(text, arm, seed) -> dict` with the loss at its end, `validation`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    found = found_runs(path, steps)
    for key in keys:
        if key not in found:
            text, arm, seed = key
            found[key] = {"text": text, "arm": arm, "steps": steps, "seed": seed}
            found[key] |= run(*key) | {"environment": environment()}
            with path.open("a") as file:
                # In one piece: a program that is interrupted leaves no half of a line.
                file.write(json.dumps(found[key]) + "\n")
        print(*key, found[key]["validation"], file=sys.stderr, flush=True)
    return {key: found[key] for key in keys}
