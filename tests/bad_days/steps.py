"""A step of one layer in either library, and whether its products are right: what the rows share."""

from typing import NamedTuple

import jax
import numpy as np
import oracle
from reliability.cases import in_two_octaves as in_two_octaves, normal as normal

from .libraries import OPERANDS, OWG

# Rounding to a normal e4m3 number moves a value by 2**-4 of it at most, to e5m2 by 2**-3 (3 and 2 bits of fraction).
ROUND = {"input": 2.0**-4, "kernel": 2.0**-4, "output_grad": 2.0**-3}
UNIT = {np.dtype(np.float32): 2.0**-24, oracle.BF16: 2.0**-8, oracle.F16: 2.0**-11}


class Step(NamedTuple):
    """The three products, and the gradient of the state, which is its next value."""

    y: jax.Array
    dx: jax.Array
    dkernel: jax.Array
    variables: dict


def step_of(library, features, **options):
    """A jitted `(variables, x, grad) -> Step` of `library.dense(features, **options)`."""
    layer = library.dense(features, **options)

    @jax.jit
    def step(variables, x, grad):
        y, vjp = jax.vjp(layer.apply, variables, x)
        gradient, dx = vjp(grad.astype(y.dtype))
        return Step(y, dx, gradient["params"]["kernel"], {**variables, OWG: gradient[OWG]})

    return step


def excess(product, a, b, round_a, round_b) -> float:
    """How far `product` is off from `a @ b` (f64), in units of what rounding both to FP8 may cost: right up to 1.

    Every term is off by (1 + round_a) (1 + round_b) - 1 of its magnitude at most. A f32 sum of K terms adds less than
    K 2**-24 of the sum of magnitudes, scales and the rounding of the result less than three more units of its dtype,
    and float16 half of its smallest subnormal.
    """
    product = np.asarray(product)
    unit, tiny = UNIT[product.dtype], 2.0**-25 if product.dtype == np.float16 else 0
    a, b, got = (np.asarray(v).astype(np.float64) for v in (a, b, product))
    if not np.isfinite(got).all():
        return float("nan")
    total = np.abs(a) @ np.abs(b)
    bound = ((1 + round_a) * (1 + round_b) - 1 + a.shape[1] * 2.0**-24 + 3 * unit) * total + tiny
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
        tally(value <= 1, f"{what}: {name} is off by {value:.3g} times what FP8 may cost")
    return max(found.values())


def is_clean(variables) -> bool:
    """Whether all state is finite and not negative."""
    return all(np.isfinite(leaf).all() and (np.asarray(leaf) >= 0).all() for leaf in jax.tree.leaves(variables[OWG]))


def same_bits(got, expected) -> bool:
    """Two trees of arrays."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return all(
        np.asarray(a).dtype == np.asarray(b).dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
        for a, b in pairs
    )


def used_state() -> oracle.LayerState:
    """Windows that hold 4, as of tensors of `in_two_octaves(..., 4)`."""
    state = oracle.State(np.float32([4, 2, 3, 1]), np.float32(1))
    return oracle.LayerState(state, state, state)


def amaxes(x, kernel, grad) -> dict:
    return {name: float(oracle.amax(value)) for name, value in zip(OPERANDS, (x, kernel, grad), strict=True)}
