"""The scoreboard: its verdicts see what is wrong, its page has every row. The rows
themselves: `test_rows.py`.
"""

import json
import pathlib
import re

import pytest

from . import __main__ as command, rows
from .libraries import FLAX, OURS
from .verdict import Outcome, Verdict, judged

PAGE = pathlib.Path(__file__).parent / "README.md"


# Flax's own FP8 promotes dtypes.
pytestmark = pytest.mark.usefixtures("as_users_have_jax", "nothing_stays_traced")


def outcome(name, library=OURS) -> Outcome:
    return judged(rows.BY_NAME[name], library).outcome


def test_the_page_has_every_row():
    text = PAGE.read_text()
    missing = [row.title for row in rows.IN_ORDER if f"| {row.title} |" not in text]
    assert not missing, missing


@pytest.mark.parametrize(
    "name, wanted",
    [("unused_expert", Outcome.WRONG), ("empty_batch", Outcome.ERROR)],
    ids=["wrong", "error"],
)
def test_the_peer_is_not(name, wanted):
    assert outcome(name, FLAX) is wanted


def fake(verdicts):
    return lambda library, names, big, said: {
        name: verdicts.get(library, RIGHT) for name in names
    }


RIGHT = Verdict(Outcome.RIGHT, "as it should be")


@pytest.mark.parametrize(
    "verdicts, status",
    [
        ({}, 0),
        ({"flax": Verdict(Outcome.WRONG, "4 times the true amax")}, 0),
        ({"jaxfp8": Verdict(Outcome.NOT_RUN, "needs a GPU")}, 0),
        ({"jaxfp8": Verdict(Outcome.WRONG, "4 times the true amax")}, 1),
        ({"jaxfp8": Verdict(Outcome.NAMED, "ValueError: x")}, 1),
        ({"jaxfp8": Verdict(Outcome.CRASH, "exit status -11")}, 1),
    ],
    ids=["right", "the peer is wrong", "not run", "wrong", "named error", "crash"],
)
def test_exit_status_and_table(verdicts, status, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "verdicts", fake(verdicts))
    assert (
        command.main(["--only", "trainers", "--json", str(tmp_path / "out.json")])
        == status
    )
    printed = capsys.readouterr().out
    count = sum(row.subject == "trainers" for row in rows.IN_ORDER)
    assert len(
        re.findall(r"^\| [^|]+ \| \S.*as it should be", printed, re.MULTILINE)
    ) in (0, count)
    record = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    assert len(record["jaxfp8"]) == len(record["flax"]) == count
    assert f"| {count} |" in printed.split("## Counts")[1]
