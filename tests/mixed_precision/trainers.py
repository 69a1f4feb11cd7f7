"""One float16 layer in every trainer, and numpy's account of its run.

The loss is `vdot(y, grad)` with small integers in x and grad, so that the gradient of
the kernel is known to the bit: `x.T @ grad`, in float16 as well as in float64, unless
it under- or overflows. That it does without loss scaling: gradients are integers times
2**-28, and float16 ends at 2**-24.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import oracle
from draws import KEY
from equality import assert_same_bits
from flax import nnx
from flax.training import train_state
from programs.known_amax import HISTORY, leaves

import jaxfp8
from jaxfp8 import mixed_precision

from .grad_scaler import GradScaler

M, K, N = 6, 8, 5
# sizes of gradients: 0 in float16, and infinite once scaled
TINY, HUGE = 2.0**-28, 2.0**10
LEARNING_RATE = 2.0**20
RECIPE = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
KERNEL = np.random.default_rng(7).integers(-4, 5, (K, N)).astype(np.float32)


def batch(seed, size=TINY):
    """(x, grad): integers up to 3, and up to 4 times `size`."""
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], (M, N))
    x = rng.integers(-3, 4, (M, K))
    grad = rng.integers(1, 5, (M, N)) * signs
    x[0, 0], grad[0, 0] = 3, 4
    return x.astype(np.float32), (grad * size).astype(np.float32)


def loss(apply, variables, x, grad):
    return jnp.vdot(apply(variables, x).astype(jnp.float32), grad)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What a user writes, framework by framework.

    Attributes:
        train: everything that a step changes, one pytree.
        gradient: `(train, loss_scale, x, grad) -> gradients`, unscaled.
        apply: `(train, gradients, finite) -> train`, which skips what is not finite.
        kernel: `train -> kernel`.
        state: `train -> {leaf: array}` of the layer's FP8 state.
    """

    train: Any
    gradient: Callable
    apply: Callable
    kernel: Callable
    state: Callable

    def step(self, train, loss_scale, x, grad):
        """The step of the documentation."""
        grads = self.gradient(train, loss_scale, x, grad)
        finite = mixed_precision.all_finite(grads)
        return self.apply(train, grads, finite), loss_scale.adjust(finite)


def linen(cls, fp8, tx):
    dot_general = jaxfp8.make_dot_general_cls(RECIPE) if fp8 else None
    layer = nn.Dense(N, use_bias=False, dtype=jnp.float16, dot_general_cls=dot_general)
    variables = {
        **layer.init(KEY, np.ones((M, K), np.float32)),
        "params": {"kernel": jnp.asarray(KERNEL)},
    }
    of_loss = functools.partial(loss, layer.apply)

    def gradient(train, loss_scale, x, grad):
        return mixed_precision.value_and_grad(of_loss, loss_scale)(
            train.params, x, grad
        )[1]

    return Trainer(
        cls.create(apply_fn=layer.apply, params=variables, tx=tx),
        gradient,
        lambda train, grads, finite: mixed_precision.select(
            finite, train.apply_gradients(grads=grads), train
        ),
        lambda train: np.asarray(train.params["params"]["kernel"]),
        lambda train: train.params[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"],
    )


def in_nnx(fp8, tx):
    dot_general = {"dot_general": jaxfp8.nnx.Fp8DotGeneral(RECIPE)} if fp8 else {}
    model = nnx.Linear(
        K, N, use_bias=False, dtype=jnp.float16, rngs=nnx.Rngs(0), **dot_general
    )
    model(np.ones((M, K), np.float32))
    model.kernel.set_value(jnp.asarray(KERNEL))
    graph, train = nnx.split((model, jaxfp8.nnx.Optimizer(model, tx)))

    def gradient(train, loss_scale, x, grad):
        model, _ = nnx.merge(graph, train, copy=True)
        scaled = lambda model: loss_scale.scale(  # noqa: E731
            loss(lambda model, x: model(x), model, x, grad)
        )
        return loss_scale.unscale(jaxfp8.nnx.grad(scaled)(model))

    def apply(train, grads, finite):
        model, optimizer = nnx.merge(graph, train, copy=True)
        with jaxfp8.nnx.step_if(finite, model, optimizer):
            optimizer.update(model, grads)
        return nnx.split((model, optimizer))[1]

    def state(train):
        found = nnx.state(nnx.merge(graph, train)[0], jaxfp8.nnx.OverwriteWithGradient)
        return nnx.to_pure_dict(found)["dot_general"]

    def kernel(train):
        return np.asarray(nnx.merge(graph, train)[0].kernel.get_value())

    return Trainer(train, gradient, apply, kernel, state)


MAKERS = {
    "our TrainState": functools.partial(linen, jaxfp8.linen.TrainState),
    "Flax's TrainState": functools.partial(linen, train_state.TrainState),
    "NNX": in_nnx,
}


class Account:
    """The run in numpy: kernel, FP8 state, loss scale."""

    def __init__(self, **options):
        self.kernel = KERNEL.copy()
        self.state = oracle.LayerState.init(HISTORY)
        self.scaler = GradScaler(**options)

    def step(self, x, grad):
        """One step of SGD, or none where the gradient overflows in float16."""
        with np.errstate(over="ignore"):
            scaled = (grad * self.scaler.scale).astype(np.float16)
        infinite = np.isinf(scaled).any()
        if not infinite:
            operands = x.astype(np.float16), self.kernel.astype(np.float16), scaled
            self.state = oracle.dense_step(*operands, self.state).state
            gradient = x.T.astype(np.float64) @ grad
            self.kernel = (self.kernel - LEARNING_RATE * gradient).astype(np.float32)
        self.scaler.update(infinite)
        return infinite

    def check(self, trainer, train, loss_scale, fp8, what):
        """Loss scale always; the kernel where products are exact; state where there is
        any.
        """
        oracle.assert_bitwise(
            loss_scale.value, self.scaler.scale, f"{what}: loss scale"
        )
        oracle.assert_bitwise(
            loss_scale.good_steps,
            np.int32(self.scaler.growth_tracker),
            f"{what}: good steps",
        )
        if not fp8:
            oracle.assert_bitwise(trainer.kernel(train), self.kernel, f"{what}: kernel")
            return
        # Products of FP8 codes are rounded; `recipes/` bounds it.
        self.kernel = trainer.kernel(train)
        assert_same_bits(dict(trainer.state(train)), leaves(self.state), what)
