"""Training in float16 with loss scaling, with FP8 and without, in every trainer,
against numpy's account of the run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx

from jaxfp8 import mixed_precision
from jaxfp8.mixed_precision import DynamicLossScale

from . import trainers
from .trainers import HUGE, MAKERS, TINY, Account, batch

pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")

SGD = optax.sgd(trainers.LEARNING_RATE)
# Without FP8 Flax's TrainState holds parameters alone, as ours does.
PLAIN = ("our TrainState", "NNX")
everywhere = pytest.mark.parametrize(
    "make, fp8",
    [
        *(pytest.param(make, True, id=f"{name}, FP8") for name, make in MAKERS.items()),
        *(pytest.param(MAKERS[name], False, id=f"{name}, float16") for name in PLAIN),
    ],
)


# --------------------------------------------------------------------------------- runs


@everywhere
def test_run(make, fp8):
    """Fourteen steps, three of which overflow; the scale grows after three good
    ones.
    """
    trainer = make(fp8, SGD)
    account = Account(growth_interval=3)
    train = trainer.train
    loss_scale = DynamicLossScale(growth_interval=3)
    step = jax.jit(trainer.step)
    skipped = 0
    for i in range(14):
        x, grad = batch(i, HUGE if i in (4, 5, 11) else TINY)
        kernel = trainer.kernel(train)
        train, loss_scale = step(train, loss_scale, x, grad)
        skips = account.step(x, grad)
        skipped += skips
        assert np.array_equal(trainer.kernel(train), kernel) == skips
        account.check(trainer, train, loss_scale, fp8, f"step {i}")
    assert skipped == 3 and loss_scale.value == 65536 * 2.0 ** (1 - 2 + 1 - 1)


# ------------------------------------------------------------------------ skipped steps


@everywhere
def test_a_skipped_step_leaves_everything(make, fp8):
    """Parameters, both moments and the count of Adam, step, FP8 state; then a good step
    moves all.
    """
    trainer = make(fp8, optax.adamw(0.1))
    step = jax.jit(trainer.step)
    train, loss_scale = step(trainer.train, DynamicLossScale(), *batch(0))
    skipped, smaller = step(train, loss_scale, *batch(1, HUGE))
    assert_same_bits(skipped, train, "skipped")
    assert smaller.value == 32768 and smaller.good_steps == 0
    good, _ = step(train, loss_scale, *batch(1))
    alike = [
        np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (good, train)), strict=True)
    ]
    assert sum(alike) <= 3  # scales of FP8 state stay for a while


def test_nnx_states_are_no_copies():
    """Two states of one module are one; `select` says so, and `as_pure` is the way
    out.
    """
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    before = nnx.state(model)
    model.kernel.set_value(model.kernel.get_value() + 1)
    with pytest.raises(
        ValueError, match="select: old: expected the arrays from before the step"
    ):
        mixed_precision.select(False, nnx.state(model), before)
    before = nnx.as_pure(nnx.state(model))
    model.kernel.set_value(model.kernel.get_value() + 1)
    nnx.update(
        model, mixed_precision.select(False, nnx.as_pure(nnx.state(model)), before)
    )
    oracle.assert_bitwise(model.kernel.get_value(), before["kernel"], "rolled back")


# ----------------------------------------------------------------------- value_and_grad


def test_value_and_grad_is_jax_s():
    """The loss as it is, aux, argnums, keyword arguments; gradients in f32."""

    def of_loss(w, v, *, bias):
        return (w * v + bias).sum(), {"w": w}

    w = jnp.float32([1, 2])
    v = jnp.float16([3, 4])
    f = mixed_precision.value_and_grad(
        of_loss, DynamicLossScale(2.0**8), argnums=(0, 1), has_aux=True
    )
    with jax.numpy_dtype_promotion("standard"):
        (value, aux), grads = f(w, v, bias=jnp.float32(0.5))
    assert value == 12 and aux["w"].tolist() == [1, 2]
    assert [g.tolist() for g in grads] == [[3, 4], [1, 2]]
    assert {g.dtype for g in grads} == {jnp.dtype("float32")}
