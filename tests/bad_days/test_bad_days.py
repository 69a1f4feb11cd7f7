"""The scoreboard: its verdicts see what is wrong, its page has every row. The rows
themselves: `test_rows.py`.
"""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import jaxfp8

from . import __main__ as command, rows, state, values
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


def summed(loss):
    """A gradient that adds the amaxes of uses up, where ours takes the largest."""

    def gradient(variables):
        found = jax.grad(loss)(variables)
        return {
            **found,
            state.OWG: jax.tree.map(lambda leaf: leaf * state.USES, found[state.OWG]),
        }

    return gradient


def overwritten(variables, gradient):
    return {**variables, state.OWG: gradient[state.OWG]}


def rounded(x, scale, fmt):
    return jaxfp8.ops.quantize(
        jnp.asarray(x).astype(jnp.bfloat16), jnp.float32(scale), fmt.dtype
    )[0]


MUTANTS = {
    "amax by sum": ("called_twice", {"grad": summed}),
    "state of a layer that did not run is overwritten": (
        "unused_expert",
        {"update": overwritten},
    ),
    "codes rounded twice": ("rounding_midpoints", {"quantize": rounded}),
    "a trainer that divides state": (
        "flax_dynamic_scale",
        {"train_state": FLAX.train_state},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name, change", MUTANTS.values(), ids=MUTANTS)
def test_mutants_of_ours_are_wrong(name, change):
    assert outcome(name) is Outcome.RIGHT
    assert outcome(name, dataclasses.replace(OURS, **change)) is Outcome.WRONG


def test_nan_in_the_history_is_wrong(monkeypatch):
    monkeypatch.setattr(values, "SIZES", {8: values.SIZES[8]})
    assert outcome("bad_value_in_x") is Outcome.RIGHT
    jax.clear_caches()
    original = OURS.history

    def with_nan(self, variables, operand):
        found = original(variables, operand).copy()
        found[found == 0] = jnp.nan
        return found

    monkeypatch.setattr(type(OURS), "history", with_nan)
    assert outcome("bad_value_in_x") is Outcome.WRONG


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
