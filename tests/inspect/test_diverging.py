"""docs/inspect.md: its Python runs, and its procedure for a diverging loss finds what
was broken on purpose.
"""

import jax
import pytest
import snippets

from jaxfp8 import inspect

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        yield snippets.run("docs/inspect.md")


def examined(page, fault):
    """`(loss, rows of summary, rows of compare)` of a run of the page."""
    variables, loss, scaled_loss = page["train"](fault)
    batch = variables, 8 * page["x"], 8 * page["y"]
    return (
        loss,
        inspect.summary(variables).rows,
        inspect.compare(scaled_loss, batch, loss=lambda loss: loss).rows,
    )


def test_a_good_run(page):
    """The control: nothing of what the procedure looks for is there."""
    loss, quantizers, products = examined(page, None)
    assert abs(loss - page["train"](enabled=False)[1]) < 0.02
    assert all(
        row["filled"] == 16 and row["follows"] in ("max", "dropped")
        for row in quantizers
    )
    limits = [57344 if row["name"].endswith("grad") else 448 for row in quantizers]
    assert all(
        limit / 8 < row["peak"] < 1.1 * limit
        for row, limit in zip(quantizers, limits, strict=True)
    )
    assert all(
        row[figure] > 20
        for row in products
        for figure in ("output", "input_grad", "kernel_grad")
    )


def test_a_layer_whose_state_stands_still(page):
    loss, quantizers, products = examined(page, "stale")
    assert loss > 0.3
    assert {row["name"].split("/")[0] for row in quantizers if row["filled"] < 16} == {
        "middle"
    }
    worst = products[0]
    assert (
        worst["layer"] == "middle"
        and max(worst["output"], worst["kernel_grad"]) < 10 < worst["input_grad"]
    )


def test_state_that_is_not_updated(page):
    loss, quantizers, products = examined(page, "not updated")
    assert loss > 0.9
    assert all(
        (row["filled"], row["follows"], row["scale"]) == (0, "unit", 1)
        for row in quantizers
    )
    assert all(
        row["input_grad"] == row["kernel_grad"] == 0 and row["output"] > 20
        for row in products
    )


def test_an_optimizer_that_acts_on_the_state(page):
    loss, quantizers, _ = examined(page, "optimizer")
    assert loss != loss
    assert all(
        (row["filled"], row["follows"]) == (0, "below zero") for row in quantizers
    )
