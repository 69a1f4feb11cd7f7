"""docs/inspect.md: its procedure for a diverging loss finds the layer of the page's
model whose state was broken on purpose.
"""

import jax
import optax
import pytest
import snippets

import jaxfp8
from jaxfp8 import inspect

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT

pytestmark = pytest.mark.slow


def test_a_layer_whose_state_stands_still():
    """A mask keeps the state of `middle` from step 12; inputs grow after step 20."""
    with jax.numpy_dtype_promotion("standard"):  # as a user has it
        page = snippets.run("docs/inspect.md")
        variables = train(page)
        batch = variables, 8 * page["x"], 8 * page["y"]
        quantizers = inspect.summary(variables).rows
        products = inspect.compare(page["loss_of"], batch, loss=lambda loss: loss).rows
    behind = {row["name"].split("/")[0] for row in quantizers if row["filled"] < 16}
    assert behind == {"middle"}
    worst = products[0]
    assert worst["layer"] == "middle"
    assert max(worst["output"], worst["kernel_grad"]) < 10 < worst["input_grad"]


def train(page):
    tx = optax.adam(3e-3)

    @jax.jit
    def step(variables, opt_state, x, y):
        with jaxfp8.autocast():
            grads = jax.grad(page["loss_of"])(variables, x, y)
        updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        state = jaxfp8.update_state(variables[OWG], grads[OWG])
        return {"params": params, OWG: state}, opt_state

    x, y = page["x"], page["y"]
    variables = page["model"].init(jax.random.key(0), x)
    opt_state = tx.init(variables["params"])
    for i in range(60):
        held = variables[OWG]["middle"]
        size = 1 if i < 20 else 8
        variables, opt_state = step(variables, opt_state, size * x, size * y)
        if i >= 12:
            variables = {**variables, OWG: {**variables[OWG], "middle": held}}
    return variables
