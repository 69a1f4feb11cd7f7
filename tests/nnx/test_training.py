"""The training step: parameters go to optax, state is overwritten exactly, and what
goes wrong says so.
"""

import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from parametrize import each_row

import jaxfp8
import jaxfp8.nnx
import jaxfp8.train
from jaxfp8.nnx import OverwriteWithGradient

from .cases import H, K, M, assert_state, expected_state, linear, operands, use

# Everything that would ruin state that it got to see.
HARSH = optax.chain(
    optax.clip_by_global_norm(1e-3), optax.adamw(1e-2, weight_decay=0.5)
)


pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")


def by_hand(layer, tx):
    optimizer = nnx.Optimizer(layer, tx, wrt=nnx.Param)

    def update(layer, gradients):
        optimizer.update(layer, gradients)
        jaxfp8.nnx.update_state(layer, gradients)

    return update


OPTIMIZERS = {
    "jaxfp8.nnx.Optimizer": lambda layer, tx: (
        jaxfp8.nnx.Optimizer(layer, tx, wrt=nnx.Param).update
    ),
    "wrt state too": lambda layer, tx: (
        jaxfp8.nnx.Optimizer(layer, tx, wrt=jaxfp8.nnx.trainable).update
    ),
    "nnx.Optimizer and train.optimizer": lambda layer, tx: (
        nnx.Optimizer(
            layer, jaxfp8.train.optimizer(tx), wrt=jaxfp8.nnx.trainable
        ).update
    ),
    "nnx.Optimizer and update_state": by_hand,
}


@each_row("make", OPTIMIZERS)
def test_five_steps(make):
    """State is the oracle's; parameters get what optax gives them where there is no FP8
    state at all.
    """
    layer = linear(0)
    state = oracle.LayerState.init(H)
    update = make(layer, HARSH)
    params = {"kernel": layer.kernel.get_value()}
    opt_state = HARSH.init(params)
    for i in range(5):
        (x,), (grad,) = operands(i, 1)
        state = oracle.dense_step(
            x, np.asarray(layer.kernel.get_value()), grad, state
        ).state
        gradients = jaxfp8.nnx.grad(use)(layer, x, grad)
        update(layer, gradients)
        updates, opt_state = HARSH.update(
            {"kernel": gradients["kernel"].get_value()}, opt_state, params
        )
        params = optax.apply_updates(params, updates)
        assert_state(layer.dot_general, state, f"step {i}")
        oracle.assert_bitwise(
            layer.kernel.get_value(), params["kernel"], f"step {i}: kernel"
        )


def test_microbatches_make_one_entry():
    """The max over the microbatches, once per optimizer step."""
    layer = linear(0)
    state = oracle.LayerState.init(H)
    optimizer = jaxfp8.nnx.Optimizer(layer, optax.MultiSteps(optax.sgd(1e-3), 3))

    @nnx.jit
    def step(layer, optimizer, x, grad):
        optimizer.update(layer, jaxfp8.nnx.grad(use)(layer, x, grad))

    for i in range(2):
        microbatches = list(zip(*operands(i, 3), strict=True))
        kernel = np.asarray(layer.kernel.get_value())
        for x, grad in microbatches:
            step(layer, optimizer, x, grad)
        uses = [(x, kernel, grad) for x, grad in microbatches]
        state = expected_state(uses, state)
        assert_state(layer.dot_general, state, f"step {i}")
        assert not np.array_equal(kernel, layer.kernel.get_value())


def test_gradients_that_are_added():
    """As `docs/state.md` says for NNX: one entry, the max."""
    layer = linear(0)
    kernel = np.asarray(layer.kernel.get_value())
    microbatches = list(zip(*operands(0, 3), strict=True))
    total = None
    for x, grad in microbatches:
        gradients = jaxfp8.nnx.grad(use)(layer, x, grad)
        total = jaxfp8.accumulate_gradients(total, gradients)
    jaxfp8.nnx.update_state(layer, total)
    uses = [(x, kernel, grad) for x, grad in microbatches]
    expected = expected_state(uses, oracle.LayerState.init(H))
    assert_state(layer.dot_general, expected, "three microbatches")


def stepped(model, optimizer, loss):
    optimizer.update(model, jaxfp8.nnx.grad(loss)(model))


def test_an_optimizer_made_anew_is_not_traced_anew():
    """As Flax's own: equal arguments make an equal graph."""
    tx = optax.adam(0.1)
    x = jnp.ones((4, K))
    traces = []

    @nnx.jit
    def step(model, optimizer):
        traces.append(1)
        stepped(model, optimizer, lambda model: jnp.sum(model(x) ** 2))

    for make in (
        lambda layer: jaxfp8.nnx.Optimizer(layer, tx),
        lambda layer: nnx.Optimizer(
            layer, jaxfp8.train.optimizer(tx), wrt=jaxfp8.nnx.trainable
        ),
    ):
        before = len(traces)
        for _ in range(3):
            layer = linear(0)
            step(layer, make(layer))
        assert len(traces) == before + 1


def test_lbfgs_is_that_of_parameters():
    """Written as for Flax's own optimizer with `wrt=nnx.Param`."""
    layer = linear(0)
    x = jnp.ones((4, K))
    loss = lambda layer: jnp.sum((layer(x) - 1) ** 2)  # noqa: E731
    lbfgs = jaxfp8.nnx.Optimizer(layer, optax.lbfgs())
    graphdef, _, rest = nnx.split(layer, nnx.Param, ...)

    def value_fn(params):
        return loss(nnx.merge(graphdef, params, rest))

    losses = []
    for _ in range(4):
        value, gradients = jaxfp8.nnx.value_and_grad(loss)(layer)
        lbfgs.update(layer, gradients, grad=gradients, value=value, value_fn=value_fn)
        losses.append(float(value))
    assert losses[-1] < losses[0]


def test_argnums():
    """Ints and DiffStates, several of them, among arrays."""
    first = linear(0)
    second = linear(1)
    (x,), (grad,) = operands(0, 1)
    loss = lambda x, first, second: use(first, x, grad) + use(second, x, grad)  # noqa: E731
    value, (dx, of_first, of_second) = jaxfp8.nnx.value_and_grad(
        loss, argnums=(0, 1, nnx.DiffState(2, OverwriteWithGradient))
    )(x, first, second)
    assert value.shape == () and dx.shape == x.shape
    assert set(of_first) == {"kernel", "dot_general"}
    assert set(of_second) == {"dot_general"}
    jaxfp8.nnx.update_state(second, of_second)
    assert second.dot_general.input_amax_history[0] == np.abs(x).max()


# ------------------------------------------------------------------------------- errors


def test_model_is_as_before_after_an_error_in_the_loss():
    layer = linear(0)
    before = jax.tree.leaves(nnx.state(layer, OverwriteWithGradient))

    def loss(layer):
        raise RuntimeError("in the loss")

    with pytest.raises(RuntimeError, match="in the loss"):
        jaxfp8.nnx.grad(loss)(layer)
    after = jax.tree.leaves(nnx.state(layer, OverwriteWithGradient))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_state_returned_by_the_loss_is_plain():
    """Aux that holds the model's state, taken while uses combine by max."""
    layer = linear(0)
    xs, grads = operands(0, 1)

    def loss(layer):
        return use(layer, xs[0], grads[0]), nnx.to_pure_dict(nnx.state(layer))

    _, aux = jaxfp8.nnx.grad(loss, has_aux=True)(layer)
    assert all(leaf.dtype == np.dtype(np.float32) for leaf in jax.tree.leaves(aux))


def test_new_state_overwritten_with_the_old_one_warns():
    layer = linear(0)
    old = nnx.as_pure(nnx.state(layer, OverwriteWithGradient))
    xs, grads = operands(0, 1)
    optimizer = jaxfp8.nnx.Optimizer(layer, optax.sgd(0.1))
    gradients = jaxfp8.nnx.grad(use)(layer, xs[0], grads[0])
    optimizer.update(layer, gradients)
    history = layer.dot_general.input_amax_history
    assert history[0] == np.abs(xs[0]).max()
    nnx.update(layer, old)  # the fault
    with warnings.catch_warnings(record=True, action="always") as caught:
        del gradients  # the end of the step
    assert ["was not stored" in str(w.message) for w in caught] == [True]
    rows = jaxfp8.inspect.summary(layer).rows
    assert {row["filled"] for row in rows} == {0}


def test_gradient_of_parameters_alone_warns():
    layer = linear(0)
    (x,), (grad,) = operands(0, 1)
    with warnings.catch_warnings(record=True, action="always") as caught:
        gradients = nnx.grad(use)(layer, x, grad)
    assert [w.category for w in caught] == [jaxfp8.FP8StateWarning]
    before = nnx.to_pure_dict(nnx.state(layer))
    for update in (
        jaxfp8.nnx.Optimizer(layer, optax.sgd(0.1)).update,
        jaxfp8.nnx.update_state,
    ):
        with pytest.raises(
            ValueError,
            match=(
                "update_state.*input_amax_history.*gradient with respect to the state"
            ),
        ):
            update(layer, gradients)
    chex.assert_trees_all_equal(before, nnx.to_pure_dict(nnx.state(layer)))


def test_bound_methods_are_refused_as_by_nnx():
    with pytest.raises(ValueError, match="bound method"):
        jaxfp8.nnx.grad(linear(0).__call__)(jnp.ones((M, K)))


@pytest.mark.ci
def test_optimizer_state_restored_without_a_target(tmp_path):
    """It has no entry for FP8 state, so that what Orbax makes of nodes without leaves
    does not matter.
    """
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    (x,), (grad,) = operands(0, 1)

    def build():
        layer = linear(0)
        return layer, jaxfp8.nnx.Optimizer(layer, tx)

    def step(layer, optimizer):
        stepped(layer, optimizer, lambda layer: use(layer, x, grad))
        return nnx.to_pure_dict(nnx.state((layer, optimizer)))

    run = build()
    state = step(*run)
    assert set(state[1]["opt_state"][1][0]["mu"]) == {"kernel"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", state)
        checkpointer.wait_until_finished()
        restored = nnx.restore_int_paths(checkpointer.restore(tmp_path / "run"))
    other = build()
    nnx.update(other, restored)
    chex.assert_trees_all_equal(step(*other), step(*run))
