"""A step of one layer in any library, and whether its products and its state are right:
what the rows share.
"""

from typing import NamedTuple

import chex
import jax
import numpy as np
import oracle
from programs.known_amax import merged

from .libraries import OPERANDS, OWG

# Rounding to a normal e4m3 number moves a value by 2**-4 of it at most, to e5m2 by
# 2**-3 (3 and 2 bits of fraction).
ROUND = {"input": 2.0**-4, "kernel": 2.0**-4, "output_grad": 2.0**-3}
FORMATS = {"input": oracle.E4M3, "kernel": oracle.E4M3, "output_grad": oracle.E5M2}
UNIT = {np.dtype(np.float32): 2.0**-24, oracle.BF16: 2.0**-8, oracle.F16: 2.0**-11}


class Step(NamedTuple):
    """The three products, and the variables with the next state."""

    y: jax.Array
    dx: jax.Array
    dkernel: jax.Array
    variables: dict

    @property
    def is_finite(self) -> bool:
        return all(
            np.isfinite(np.asarray(product, np.float32)).all() for product in self[:3]
        )

    def of(self, operand: str) -> tuple:
        """The two products that an operand goes into, and the third."""
        y, dx, dkernel, _ = self
        return {
            "input": (y, dkernel, dx),
            "kernel": (y, dx, dkernel),
            "output_grad": (dx, dkernel, y),
        }[operand]


def step_of(library, features, donate=False, **options):
    """A jitted `(variables, x, grad) -> Step` of
    `library.dense(features, **options)`.
    """
    layer = library.dense(features, **options)

    def step(variables, x, grad):
        y, vjp = jax.vjp(layer.apply, variables, x)
        gradient, dx = vjp(grad.astype(y.dtype))
        return Step(
            y, dx, gradient["params"]["kernel"], {**variables, OWG: gradient[OWG]}
        )

    return jax.jit(step, donate_argnums=0 if donate else ())


def excess(product, a, b, round_a, round_b) -> float:
    """How far `product` is off from `a @ b` (f64), in units of what rounding both to
    FP8 may cost: right up to 1.

    Every term is off by (1 + round_a) (1 + round_b) - 1 of its magnitude at most. A f32
    sum of K terms adds less than K 2**-24 of the sum of magnitudes, scales and the
    rounding of the result less than three more units of its dtype, and float16 half of
    its smallest subnormal.
    """
    product = np.asarray(product)
    unit = UNIT[product.dtype]
    tiny = 2.0**-25 if product.dtype == np.float16 else 0
    a, b, got = (np.asarray(v).astype(np.float64) for v in (a, b, product))
    if not np.isfinite(got).all():
        return float("nan")
    total = np.abs(a) @ np.abs(b)
    bound = (
        (1 + round_a) * (1 + round_b) - 1 + a.shape[1] * 2.0**-24 + 3 * unit
    ) * total + tiny
    return float((np.abs(got - a @ b) / np.where(bound > 0, bound, 1)).max(initial=0))


def excesses(step, x, kernel, grad) -> dict[str, float]:
    """Of y, dx and dkernel."""
    e = ROUND
    return {
        "y": excess(step.y, x, kernel, e["input"], e["kernel"]),
        "dx": excess(step.dx, grad, kernel.T, e["output_grad"], e["kernel"]),
        "dkernel": excess(step.dkernel, x.T, grad, e["input"], e["output_grad"]),
    }


def tally_products(tally, step, operands, what: str) -> float:
    """Three cases, one a product; returns the largest excess."""
    found = excesses(step, *operands)
    for name, value in found.items():
        tally(
            value <= 1, f"{what}: {name} is off by {value:.3g} times what FP8 may cost"
        )
    return max(found.values())


def next_state(state: oracle.LayerState, *uses) -> oracle.LayerState:
    """By the oracle, after a step with these `(x, kernel, grad)`s: slot 0 is the
    largest of their amaxes.
    """
    return merged(
        [
            oracle.LayerState(
                *(
                    oracle.step(value, getattr(state, name), FORMATS[name])[2]
                    for name, value in zip(OPERANDS, operands, strict=True)
                )
            )
            for operands in uses
        ]
    )


def tally_state(
    tally, library, variables, state, *uses, what: str
) -> oracle.LayerState:
    """Ours alone: the state after `uses` is the oracle's, bitwise. Returns that."""
    expected = next_state(state, *uses)
    if library.is_ours:
        got = library.variables(None, library.state(variables))
        tally(
            same_bits(got, library.variables(None, expected)),
            f"{what}: state {got}, expected {expected}",
        )
    return expected


def is_clean(variables) -> bool:
    """Whether all state is finite and not negative."""
    return all(
        np.isfinite(leaf).all() and (np.asarray(leaf) >= 0).all()
        for leaf in jax.tree.leaves(variables[OWG])
    )


def same_bits(got, expected) -> bool:
    """Whether two trees are equal in structure, shapes, dtypes and every bit."""
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
        # As integers, because a NaN has a payload and a zero a sign.
        chex.assert_trees_all_equal(
            jax.tree.map(oracle.bits, got), jax.tree.map(oracle.bits, expected)
        )
    except AssertionError:
        return False
    return True


def used_state() -> oracle.LayerState:
    """Windows that hold 4, as of tensors of `in_two_octaves(..., 4)`."""
    state = oracle.State(np.float32([4, 2, 3, 1]), np.float32(1))
    return oracle.LayerState(state, state, state)


def amaxes(x, kernel, grad) -> dict:
    return {
        name: float(oracle.amax(value))
        for name, value in zip(OPERANDS, (x, kernel, grad), strict=True)
    }


def tally_amaxes(
    tally, library, variables, operands, what: str = "", rtol: float = 1e-6
) -> None:
    """Slot 0 of every history is the true amax."""
    for name, true in amaxes(*operands).items():
        ratio = library.history(variables, name)[0] / true
        tally(abs(ratio - 1) < rtol, f"{what}{name}: {ratio:.3g} times the true amax")


def normal(seed, shape, size=1.0, dtype=np.float32):
    return (
        (np.random.default_rng(seed).standard_normal(shape) * size)
        .astype(np.float32)
        .astype(dtype)
    )


def in_two_octaves(seed, shape, largest):
    """Magnitudes from a quarter of `largest` up to it: all normal in FP8 once the scale
    fits. Signs at random.
    """
    rng = np.random.default_rng(seed)
    magnitude = largest * 2.0 ** -rng.uniform(0, 2, shape)
    return (magnitude * rng.choice([-1, 1], shape)).astype(np.float32)


def operands(
    m, k, n, data=1.0, grads=1.0, kernel=1.0, seed=0, make=in_two_octaves
) -> list:
    """x, kernel and grad of these sizes."""
    shapes = ((m, k), data), ((k, n), kernel), ((m, n), grads)
    return [make(seed + i, shape, size) for i, (shape, size) in enumerate(shapes)]
