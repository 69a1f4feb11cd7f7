"""Quantizers that round to a grid of binary fractions, so that numpy knows every result
of a product to the bit.

Operands are multiples of 1/64 below 4. Then products of up to 64 of them, rounded to
grids or not, are binary fractions of less than 24 bits: float32 holds them and all
their partial sums exactly.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

import jaxfp8
from recipes.cases import MATMUL as MATMUL

ROLES = (
    "linear_input",
    "linear_weight",
    "linear_output",
    "linear_grad_output",
    "linear_grad_input",
)
M, K, N = 6, 10, 8


def codes_of(x, steps):
    return jnp.round(x.astype(jnp.float32) * steps).astype(jnp.int16)


@dataclasses.dataclass(frozen=True)
class Grid(jaxfp8.Quantizer):
    """Multiples of 1 / steps, with one scale."""

    steps: int

    def quantize(self, x, state):
        assert x.ndim == 2, "a quantizer sees one matrix"
        scale_inv = jnp.full((1,), 1 / self.steps, jnp.float32)
        return jaxfp8.QTensor(codes_of(x, self.steps), scale_inv), state


@dataclasses.dataclass(frozen=True)
class TwoGrids(jaxfp8.Quantizer):
    """One grid for `data`, another for `data_t`, each with a scale for each row."""

    steps: int
    steps_t: int

    def quantize(self, x, state):
        parts = *self.rows(x, self.steps), *self.rows(x.T, self.steps_t)
        return jaxfp8.QTensor(*parts, block=(1, None)), state

    def rows(self, x, steps):
        return codes_of(x, steps), jnp.full((len(x), 1), 1 / steps, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Counting(jaxfp8.Quantizer):
    """The grid becomes finer with each step; the state counts them and remembers the
    last amax.
    """

    steps: int = 1

    def init(self):
        return {
            "amax": jnp.zeros((1,), jnp.float32),
            "count": jnp.zeros((1,), jnp.float32),
        }

    def quantize(self, x, state):
        steps = self.steps * 2.0 ** state["count"]
        amax = jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1)
        next_state = {"amax": amax, "count": state["count"] + 1}
        return jaxfp8.QTensor(codes_of(x, steps[None]), 1 / steps), next_state


def rounded(x, steps):
    return x if steps is None else np.round(x * steps) / steps


def layer(x, kernel, grad, steps, steps_t=None):
    """(y, dx, dkernel): `steps` by role; `steps_t` of what is read transposed, where
    that differs.
    """
    steps_t = {**steps, **(steps_t or {})}
    a, b, g = (
        [rounded(t, of.get(role)) for of in (steps, steps_t)]
        for t, role in (
            (x, "linear_input"),
            (kernel, "linear_weight"),
            (grad, "linear_grad_output"),
        )
    )
    y, dx, dkernel = a[0] @ b[0], g[0] @ b[1].T, a[1].T @ g[1]
    return (
        rounded(y, steps.get("linear_output")),
        rounded(dx, steps.get("linear_grad_input")),
        dkernel,
    )


def fractions(shape, seed, size=4):
    """Multiples of 1/64, f32."""
    return (
        np.random.default_rng(seed).integers(-64 * size + 1, 64 * size, shape) / 64
    ).astype(np.float32)


def data(seed=0, m=M, k=K, n=N):
    """x `[m, k]`, kernel `[k, n]`, grad `[m, n]`."""
    return (
        fractions((m, k), seed),
        fractions((k, n), seed + 1),
        fractions((m, n), seed + 2),
    )
