"""A Linen layer step by step beside the oracle's, and data whose products are right or wrong: what the rows share."""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
import oracle

import jaxfp8

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
OPERANDS = ("input", "kernel", "output_grad")
HISTORY = 4


def dense(features, dtype=None, **recipe):
    """`nn.Dense` in FP8, without a bias; `recipe` are fields of `DelayedScaling`."""
    recipe = jaxfp8.DelayedScaling(**{"amax_history_len": HISTORY, **recipe})
    return nn.Dense(
        features, use_bias=False, dtype=dtype, dot_general_cls=functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
    )


def variables_of(kernel, state: oracle.LayerState | None = None):
    """The layer's variables, with a state as the oracle has it; without one that of a layer that has not run."""
    state = state or oracle.LayerState.init(HISTORY)
    leaves = {}
    for name in OPERANDS:
        part = getattr(state, name)
        leaves |= {f"{name}_amax_history": part.amax_history, f"{name}_scale": np.reshape(part.scale, (1,))}
    return {"params": {"kernel": kernel}, OWG: {"Fp8DotGeneral_0": leaves}}


class Step(NamedTuple):
    """The three products of a step and the layer's variables with the next state."""

    y: jax.Array
    dx: jax.Array
    dkernel: jax.Array
    variables: dict


def step_of(layer):
    """A jitted `(variables, x, grad) -> Step`; `grad` is the gradient of the layer's output, in the layer's dtype."""

    @jax.jit
    def step(variables, x, grad):
        y, vjp = jax.vjp(layer.apply, variables, x)
        gradient, dx = vjp(grad.astype(y.dtype))
        return Step(y, dx, gradient["params"]["kernel"], {**variables, OWG: gradient[OWG]})

    return step


def state_of(variables, operand) -> oracle.State:
    """One quantizer's state as the oracle's."""
    leaves = variables[OWG]["Fp8DotGeneral_0"]
    return oracle.State(np.asarray(leaves[f"{operand}_amax_history"]), np.asarray(leaves[f"{operand}_scale"])[0])


def assert_state(variables, expected: oracle.LayerState, what: str) -> None:
    """Bitwise."""
    for operand in OPERANDS:
        assert_quantizer(variables, operand, getattr(expected, operand), what)


def assert_quantizer(variables, operand, expected: oracle.State, what: str) -> None:
    """Bitwise, of one operand."""
    got = state_of(variables, operand)
    oracle.assert_bitwise(got.amax_history, expected.amax_history, f"{what}: {operand} history")
    oracle.assert_bitwise(got.scale, np.float32(expected.scale), f"{what}: {operand} scale")


def assert_same_bits(got, expected, what: str) -> None:
    """Two trees: the same structure and the same bits."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), what
    for (path, leaf), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        oracle.assert_bitwise(leaf, np.asarray(other), f"{what}: {jax.tree_util.keystr(path)}")


def normal(seed, shape, size=1.0, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(np.float32).astype(dtype)


def used_state(seed=0) -> oracle.LayerState:
    """Full windows, no two slots alike, and stored scales that no window gives."""
    rng = np.random.default_rng(seed)
    parts = [
        oracle.State(rng.uniform(1, 9, HISTORY).astype(np.float32), np.float32(rng.uniform(1, 2))) for _ in OPERANDS
    ]
    return oracle.LayerState(*parts)


# Rounding to a normal e4m3 number moves a value by 2**-4 of it at most, to e5m2 by 2**-3 (3 and 2 bits of fraction).
ROUND = {"input": 2.0**-4, "kernel": 2.0**-4, "output_grad": 2.0**-3}


def in_two_octaves(seed, shape, largest):
    """Magnitudes from a quarter of `largest` up to it: all normal in FP8 once the scale fits. Signs at random."""
    rng = np.random.default_rng(seed)
    magnitude = largest * 2.0 ** -rng.uniform(0, 2, shape)
    return (magnitude * rng.choice([-1, 1], shape)).astype(np.float32)


def is_right(product, a, b, round_a, round_b) -> bool:
    """Whether `product` is `a @ b` but for the rounding of both to FP8.

    Each term is off by (1 + round_a) (1 + round_b) - 1 of its magnitude at most. The f32 sum of K < 2**6 terms adds
    less than 2**-17 of the sum of magnitudes, scales less than 2**-20.
    """
    a, b, product = (np.asarray(v, np.float64) for v in (a, b, product))
    bound = (1 + round_a) * (1 + round_b) - 1 + 2.0**-16
    return bool((np.abs(product - a @ b) <= bound * (np.abs(a) @ np.abs(b))).all())


def products_are_right(step, x, kernel, grad) -> list[bool]:
    """Of y, dx and dkernel."""
    return [
        is_right(step.y, x, kernel, ROUND["input"], ROUND["kernel"]),
        is_right(step.dx, grad, kernel.T, ROUND["output_grad"], ROUND["kernel"]),
        is_right(step.dkernel, x.T, grad, ROUND["input"], ROUND["output_grad"]),
    ]
