"""Paired training runs: the texts, and one JSON file a run in a folder, where what is there is not run again."""

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
    source = "".join(file.read_text(encoding="utf-8") for file in files if not file.stem.endswith("_test"))
    return dict(zip(TEXTS, (Corpus(), Corpus(source)), strict=True))


def file_of(folder: pathlib.Path, key: tuple, steps: int) -> pathlib.Path:
    """The file of a run; `key` is `(text, arm, seed)`."""
    text, arm, seed = key
    return folder / f"{text}-{arm}-{steps}-{seed}.json"


def found_runs(folder: pathlib.Path, steps: int) -> dict:
    """What the files of all runs of that many steps have, by key."""
    found = {}
    for path in folder.glob(f"*-*-{steps}-*.json"):
        text, arm, _, seed = path.stem.split("-")
        found[text, arm, int(seed)] = json.loads(path.read_text())
    return found


def run_missing(folder: pathlib.Path, keys, steps: int, run) -> dict:
    """Run what is missing in `folder`; return what the files of all these runs have, by key.

    Args:
        folder: of the files.
        keys: `(text, arm, seed)`, in the order to run them.
        steps: of a run.
        run: `(text, arm, seed) -> dict` with the loss at its end, `validation`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for key in keys:
        path = file_of(folder, key, steps)
        if not path.exists():
            written = json.dumps(run(*key) | {"environment": environment()})
            # A run that is interrupted leaves no half of a file.
            path.with_suffix(".new").write_text(written + "\n")
            path.with_suffix(".new").rename(path)
        print(*key, json.loads(path.read_text())["validation"], file=sys.stderr, flush=True)
    found = found_runs(folder, steps)
    return {key: found[key] for key in keys}
