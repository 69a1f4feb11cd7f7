"""Every row of README.md for jaxfp8, through each kind of layer that it can be asked of; and that the table is true."""

import ast
import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bad_days import rows
from bad_days.libraries import LAYERS, OURS
from bad_days.steps import Step, excesses, normal, operands
from bad_days.trainers import K, M, N
from bad_days.verdict import Outcome, judged
from flax.training import dynamic_scale, train_state

import jaxfp8

# One of each kind is what `make test` shows. Those that start processes, need 12 GiB or train are slow.
SHOWN = {
    "bad_value_in_x",
    "empty_batch",
    "unused_expert",
    "flax_dynamic_scale",
    "bad_numbers",
    "under_jit",
    "error_in_a_program",
}
SLOW = {"large", "processes", "reload", "reload_without", "cache", "proof"}
NEEDS_A_GPU = {"gpus"}
# Where neither optax nor Flax's own classes promote dtypes, the session's strict rules hold.
STRICT = ("values", "shapes", "meshes", "ffi")


def _cases():
    for row in rows.IN_ORDER:
        for name, layer in LAYERS.items() if row.any_layer else [("Linen", OURS)]:
            is_shown = row.name in SHOWN and name == "Linen"
            marks = [pytest.mark.slow] if row.name in SLOW else [] if is_shown else [pytest.mark.ci]
            if row.name not in NEEDS_A_GPU:
                yield pytest.param(row, layer, marks=marks, id=f"{row.subject}-{row.name}-{name}")


@pytest.mark.parametrize("row, layer", list(_cases()))
def test_row(row, layer):
    rules = ("strict", "raise") if row.subject in STRICT else ("standard", "allow")
    with jax.numpy_dtype_promotion(rules[0]), jax.numpy_rank_promotion(rules[1]):
        verdict = judged(row, dataclasses.replace(layer, big=row.name == "large"))
    assert verdict.outcome is Outcome.RIGHT, verdict


# ------------------------------------------------------------------------------------------ what nobody can tell


LAYER = OURS.dense(N)


def loss(variables, x, grad):
    return jnp.vdot(LAYER.apply(variables, x), grad)


def loss_scale(variables, helped):
    """Flax's DynamicScale divides the whole tree by 65536, and Flax's TrainState stores what it is given."""
    cls = jaxfp8.linen.TrainState if helped else train_state.TrainState
    scaler = dynamic_scale.DynamicScale(scale=65536.0)

    def advance(train, x, grad):
        *_, grads = scaler.value_and_grad(lambda v: loss(v, x, grad))(train.params)
        return train.apply_gradients(grads=grads)

    return cls.create(apply_fn=LAYER.apply, params=variables, tx=optax.sgd(0.1)), advance, lambda train: train.params


UNSEEN = pytest.mark.xfail(
    strict=True, reason="a product cannot tell state that is right from state that was scaled as a whole"
)


@pytest.mark.ci
@pytest.mark.parametrize("helped", [True, pytest.param(False, marks=UNSEEN)], ids=["with helper", "without"])
def test_products_after_a_hundred_steps(helped):
    """With our TrainState the products are right; without it, nobody says that they are not."""
    x, kernel, _ = operands(M, K, N)
    grad = normal(1, (M, N), 1e-4)
    with jax.numpy_dtype_promotion("standard"):
        train, advance, variables_in = loss_scale(jax.tree.map(jnp.asarray, OURS.variables(kernel)), helped)
        advance = jax.jit(advance)
        for _ in range(100):
            train = advance(train, x, grad)
    variables = variables_in(train)
    y, vjp = jax.vjp(LAYER.apply, variables, x)
    gradient, dx = vjp(grad)
    got = Step(y, dx, gradient["params"]["kernel"], variables)
    assert excesses(got, x, np.asarray(variables["params"]["kernel"]), grad)["y"] <= 1


# ------------------------------------------------------------------------------------------------------ the table

FOLDER = pathlib.Path(__file__).parent
README = (FOLDER / "README.md").read_text()
NAMED = set(re.findall(r"`([\w/]+\.py::test_\w+)`", README))


def names_in(file: pathlib.Path) -> set[str]:
    """The `file::test` of a file, from its source."""
    if not file.exists():
        return set()
    functions = (node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    return {f"{file.relative_to(FOLDER.parent).as_posix()}::{name}" for name in functions if name.startswith("test_")}


def test_every_test_named_exists():
    files = {name.split("::")[0] for name in NAMED}
    assert len(files) > 15, "the table was read"
    missing = NAMED - set().union(*(names_in(FOLDER.parent / file) for file in files))
    assert not missing, sorted(missing)
    # Nothing that looks like a test escapes the check because it is written in another way.
    assert README.count("::test_") == len(re.findall(r"`[\w/]+\.py::test_\w+`", README))


def test_every_row_of_the_table_is_judged():
    lines = [line for line in README.splitlines() if line.startswith("| ") and not line.startswith("| row | ")]
    table, judges = {line.split(" | ")[0].removeprefix("| ") for line in lines}, {row.of for row in rows.IN_ORDER}
    assert len(table) == len(lines) > 60 and table == judges, table ^ judges
