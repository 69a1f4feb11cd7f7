"""docs/inspect.md: its procedure for a diverging loss finds what was broken on purpose
in the page's model.
"""

import jax
import optax
import pytest
import snippets

import jaxfp8
from jaxfp8 import inspect

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page():
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        yield snippets.run("docs/inspect.md")


def train(page, fault=None, steps=60, enabled=True):
    """Train the page's model; return variables, loss and loss function. Inputs grow
    after 20 steps.
    """
    loss_scale = 1e-6 if fault == "not updated" else 1.0
    tx = optax.adam(3e-3)
    x = page["x"]
    y = page["y"]

    def scaled_loss(variables, x, y):
        return loss_scale * page["loss_of"](variables, x, y)

    @jax.jit
    def step(variables, opt_state, x, y):
        with jaxfp8.autocast(enabled=enabled):
            loss, grads = jax.value_and_grad(scaled_loss)(variables, x, y)
        if fault == "optimizer":  # acts on the state as well
            updates, opt_state = tx.update(grads, opt_state, variables)
            return optax.apply_updates(variables, updates), opt_state, loss
        updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
        state = jaxfp8.update_state(variables[OWG], grads[OWG])
        if fault == "not updated":
            state = variables[OWG]
        params = optax.apply_updates(variables["params"], updates)
        return {"params": params, OWG: state}, opt_state, loss

    variables = page["model"].init(jax.random.key(0), x)
    opt_state = tx.init(variables if fault == "optimizer" else variables["params"])
    for i in range(steps):
        held = variables[OWG]["middle"]
        size = 1 if i < 20 else 8
        variables, opt_state, loss = step(variables, opt_state, size * x, size * y)
        if fault == "stale" and i >= 12:  # a mask that was meant for something else
            variables = {**variables, OWG: {**variables[OWG], "middle": held}}
    return variables, float(loss) / loss_scale, scaled_loss


def examined(page, fault):
    """`(loss, rows of summary, rows of compare)` of a run of the page's model."""
    variables, loss, scaled_loss = train(page, fault)
    batch = variables, 8 * page["x"], 8 * page["y"]
    return (
        loss,
        inspect.summary(variables).rows,
        inspect.compare(scaled_loss, batch, loss=lambda loss: loss).rows,
    )


def test_a_good_run(page):
    """The control: nothing of what the procedure looks for is there."""
    loss, quantizers, products = examined(page, None)
    assert abs(loss - train(page, enabled=False)[1]) < 0.02
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
    assert worst["layer"] == "middle"
    assert max(worst["output"], worst["kernel_grad"]) < 10 < worst["input_grad"]


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
