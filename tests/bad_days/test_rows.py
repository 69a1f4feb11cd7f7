"""Every row of README.md for jaxfp8, through each kind of layer that it can be asked
of; and that the table is true.
"""

import ast
import dataclasses
import pathlib
import re

import jax
import optax
import pytest
from flax.training import dynamic_scale

from bad_days import rows, trainers
from bad_days.libraries import FLAX, LAYERS, OURS
from bad_days.steps import excesses, normal, step_of
from bad_days.verdict import Outcome, judged

FOLDER = pathlib.Path(__file__).parent
README = (FOLDER / "README.md").read_text()
TABLE = [
    line.split(" | ")
    for line in README.splitlines()
    if line.startswith("| ") and not line.startswith("| row | ")
]
# Rows that other tests show are of the scoreboard, and nightly.
ELSEWHERE = {cells[0].removeprefix("| ") for cells in TABLE if "::test_" in cells[1]}
# One of each kind is what `make test` shows. Those that start processes, need 12 GiB or
# train are slow.
SHOWN = {
    "bad_value_in_x",
    "empty_batch",
    "unused_expert",
    "flax_dynamic_scale",
    "bad_numbers",
    "under_jit",
}
SLOW = {"large", "processes", "reload", "reload_without", "cache", "proof"}
# Where neither optax nor Flax's own classes promote dtypes, the session's strict rules
# hold.
STRICT = ("values", "shapes", "meshes", "ffi")


def _cases():
    for row in rows.IN_ORDER:
        for name, layer in LAYERS.items() if row.any_layer else [("Linen", OURS)]:
            is_shown = row.name in SHOWN and name == "Linen"
            is_slow = row.name in SLOW or row.of in ELSEWHERE
            marks = (
                [] if is_shown else [pytest.mark.slow] if is_slow else [pytest.mark.ci]
            )
            yield pytest.param(
                row, layer, marks=marks, id=f"{row.subject}-{row.name}-{name}"
            )


@pytest.mark.parametrize("row, layer", list(_cases()))
def test_row(row, layer):
    rules = ("strict", "raise") if row.subject in STRICT else ("standard", "allow")
    with jax.numpy_dtype_promotion(rules[0]), jax.numpy_rank_promotion(rules[1]):
        verdict = judged(row, dataclasses.replace(layer, big=row.name == "large"))
    assert verdict.outcome is Outcome.RIGHT, verdict


# ----------------------------------------------------------------- what nobody can tell


UNSEEN = pytest.mark.xfail(
    strict=True,
    reason=(
        "a product cannot tell state that is right from state that was scaled as a "
        "whole"
    ),
)


@pytest.mark.ci
@pytest.mark.parametrize(
    "cls",
    [OURS.train_state, pytest.param(FLAX.train_state, marks=UNSEEN)],
    ids=["ours", "Flax"],
)
def test_products_after_a_hundred_steps(cls):
    """With our TrainState the products are right. Flax's stores what DynamicScale has
    divided, and nobody says so.
    """
    library, scaler = (
        dataclasses.replace(OURS, train_state=cls),
        dynamic_scale.DynamicScale(scale=65536.0),
    )
    x, _, _ = trainers.operands(0)
    grad = normal(1, (trainers.M, trainers.N), 1e-4)
    with jax.numpy_dtype_promotion("standard"):
        train = trainers.create(library, optax.sgd(0.1))

        @jax.jit
        def advance(train):
            *_, grads = scaler.value_and_grad(
                lambda v: trainers.loss(train, v, x, grad)
            )(train.params)
            return train.apply_gradients(grads=grads)

        for _ in range(100):
            train = advance(train)
    got = step_of(library, trainers.N)(train.params, x, grad)
    assert excesses(got, x, trainers.kernel_of(train), grad)["y"] <= 1


# ---------------------------------------------------------------------------- the table

NAMED = set(re.findall(r"`([\w/]+\.py::test_\w+)`", README))


def names_in(file: pathlib.Path) -> set[str]:
    """The `file::test` of a file, from its source."""
    if not file.exists():
        return set()
    functions = (
        node.name
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    )
    return {
        f"{file.relative_to(FOLDER.parent).as_posix()}::{name}"
        for name in functions
        if name.startswith("test_")
    }


def test_every_test_named_exists():
    files = {name.split("::")[0] for name in NAMED}
    assert len(files) > 15, "the table was read"
    missing = NAMED - set().union(*(names_in(FOLDER.parent / file) for file in files))
    assert not missing, sorted(missing)
    # Nothing that looks like a test escapes the check because it is written in another
    # way.
    assert README.count("::test_") == len(re.findall(r"`[\w/]+\.py::test_\w+`", README))


def test_every_row_of_the_table_is_shown():
    """A row is a program here, or names the tests that show it: where Flax passes it
    too, or has no part in it.
    """
    table, judges = (
        {cells[0].removeprefix("| ") for cells in TABLE},
        {row.of for row in rows.IN_ORDER},
    )
    assert len(table) == len(TABLE) > 60 and table - ELSEWHERE <= judges <= table, (
        table ^ judges
    )
