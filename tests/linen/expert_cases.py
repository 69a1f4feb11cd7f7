"""Operands of an Experts layer that FP8 multiplies exactly, and what a loop over its
experts in numpy says.
"""

import dataclasses

import numpy as np
import oracle
from programs.known_amax import leaves

COUNT, WIDTH, HIDDEN, HISTORY = 4, 6, 8, 4
F32 = np.float32
# The experts of each token. Those of the last case name no expert in places.
CHOSEN = {
    "two": [[2, 0], [0, 3], [3, 1], [1, 2], [0, 1], [2, 3], [2, 0]],
    "all tokens to one": [[1], [1], [1], [1], [1]],
    "no expert": [
        *([2, -1], [COUNT, 3], [-7, 99], [1, 2]),
        *([0, -1], [2, 3], [3, 3], [2, 0]),
    ],
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of a step: x and grad `[tokens, WIDTH]`, expert and weights
    `[tokens, chosen]`, and the kernels.

    All are small integers or powers of two. A column of wi has two elements that are
    not zero and a row of wo has one, each 1 or -1: no value of forward or backward
    needs more bits than its FP8 dtype has, whatever the order of a sum.
    """

    x: np.ndarray
    expert: np.ndarray
    weights: np.ndarray
    grad: np.ndarray
    wi: np.ndarray
    wo: np.ndarray


def case(name: str) -> Case:
    rng = np.random.default_rng(7)
    expert = np.int32(CHOSEN[name])
    tokens = len(expert)
    sign = lambda *shape: rng.choice([-1, 1], shape)  # noqa: E731
    wi = np.zeros((COUNT, WIDTH, HIDDEN), F32)
    wo = np.zeros((COUNT, HIDDEN, WIDTH), F32)
    for e in range(COUNT):
        for column in range(HIDDEN):
            wi[e, rng.permutation(WIDTH)[:2], column] = sign(2)
            wo[e, column, rng.integers(WIDTH)] = sign()
    x = rng.integers(-2, 3, (tokens, WIDTH)).astype(F32)
    # rows of no expert alone hold the largest number
    x[np.all((expert < 0) | (expert >= COUNT), axis=1)] = 8
    return Case(
        x=x,
        expert=expert,
        weights=rng.choice([0.5, 1, 2], expert.shape).astype(F32),
        grad=rng.choice([-1, 0, 1, 2], (tokens, WIDTH)).astype(F32),
        wi=wi,
        wo=wo,
    )


def rows_of(case: Case) -> list[tuple]:
    """The rows that have an expert, in the order of experts: expert, token, slot, x,
    what the first product gives, and the gradients of both products' results.
    """
    rows = []
    for token, slot in np.ndindex(case.expert.shape):
        e = case.expert[token, slot]
        if 0 <= e < COUNT:
            x = case.x[token]
            before = x @ case.wi[e]
            grad = case.weights[token, slot] * case.grad[token]
            dbefore = (grad @ case.wo[e].T) * (before > 0)
            rows.append((e, token, slot, x, before, dbefore, grad))
    return sorted(rows, key=lambda row: row[0])


def loop(case: Case) -> dict:
    """A relu mixture by its definition, row by row, with its gradients."""
    operands = {"y": case.x, "x": case.x}
    operands |= {name: getattr(case, name) for name in ("weights", "wi", "wo")}
    sums = {name: np.zeros_like(operand) for name, operand in operands.items()}
    for e, token, slot, x, before, dbefore, grad in rows_of(case):
        hidden = np.maximum(before, 0)
        result = hidden @ case.wo[e]
        sums["y"][token] += case.weights[token, slot] * result
        sums["x"][token] += dbefore @ case.wi[e].T
        sums["weights"][token, slot] = case.grad[token] @ result
        sums["wi"][e] += np.outer(x, dbefore)
        sums["wo"][e] += np.outer(hidden, grad)
    return sums


def next_states(case: Case) -> dict:
    """The state of both products after one step from none, by the oracle: rows sorted
    by expert, and no other row.
    """
    experts, _, _, *arrays = zip(*rows_of(case), strict=True)
    x, before, dbefore, grad = map(np.stack, arrays)
    sizes = np.bincount(experts, minlength=COUNT).tolist()
    first = oracle.LayerState.init(HISTORY)
    products = {
        "wi": (x, case.wi, sizes, dbefore),
        "wo": (np.maximum(before, 0), case.wo, sizes, grad),
    }
    return {
        name: leaves(oracle.ragged_step(*operands, first).state)
        for name, operands in products.items()
    }
