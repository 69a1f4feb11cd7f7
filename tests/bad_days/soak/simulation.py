"""The run in numpy: weights and FP8 state after each step, from the oracle's
quantization and exact sums.
"""

import dataclasses

import ml_dtypes
import numpy as np
import oracle
from programs.known_amax import merged

HISTORY = 4
BF16 = ml_dtypes.bfloat16


@dataclasses.dataclass(frozen=True)
class Run:
    """Weights by name, and the state of each layer."""

    weights: dict
    state: dict

    @staticmethod
    def start(weights) -> "Run":
        return Run(weights, {name: oracle.LayerState.init(HISTORY) for name in weights})


def unit(values) -> float:
    """The largest power of two that divides all values; infinity where there are only
    zeros.
    """
    values = np.asarray(values, np.float64)
    mantissas, exponents = np.frexp(values[values != 0])
    integers = (mantissas * 2.0**53).astype(np.int64)
    return float(
        np.ldexp((integers & -integers).astype(np.float64), exponents - 53).min(
            initial=np.inf
        )
    )


def product(a, b, a_inv, b_inv, dtype=np.float32):
    """`(a @ b) * (a_inv * b_inv)` of codes, rounded to f32 and then to `dtype`. Rows
    and columns of a NaN are NaN.

    Raises:
        AssertionError: some order of f32 additions could round.
    """
    a = np.asarray(a, np.float64)
    b = np.asarray(b, np.float64)
    x, y = (np.where(np.isnan(v), 0, v) for v in (a, b))
    exact = x @ y
    magnitude = np.abs(x) @ np.abs(y)
    assert magnitude.max() <= 2.0**24 * unit(x) * unit(y), (
        "the run leaves the range of exact sums"
    )
    exact = np.where(
        np.isnan(a).any(1)[:, None] | np.isnan(b).any(0)[None], np.nan, exact
    )
    inverse = np.float32(a_inv) * np.float32(b_inv)
    assert np.frexp(inverse)[0] == 0.5, "a scale is no power of two"
    return (exact.astype(np.float32) * inverse).astype(dtype)


def activation(y, size, pin, low):
    """Multiples of 1/4 from `low` to 7, times `size`; 7 times `size` where it is
    pinned.
    """
    y = y.reshape(pin.shape)
    return (
        np.where(pin, np.float32(7), np.clip(np.rint(y * 4) / 4, low, 7)) * size
    ).astype(np.float32)


def gradient(run: Run, batch):
    """`(gradients of weights, next states)` of one microbatch; as `soak.run.loss` has
    it.
    """
    x, target, size, pin = batch
    rows = x.reshape(-1, x.shape[-1])
    first = run.state["w1"]
    second = run.state["w2"]
    x1, _, x1_next = oracle.step(rows, first.input, oracle.E4M3)
    k1, _, k1_next = oracle.step(run.weights["w1"], first.kernel, oracle.E4M3)
    y1 = product(x1, k1, x1_next.scale, k1_next.scale)
    h = activation(y1, size, pin, 0).astype(BF16).reshape(len(rows), -1)
    x2, _, x2_next = oracle.step(h, second.input, oracle.E4M3)
    k2, _, k2_next = oracle.step(run.weights["w2"], second.kernel, oracle.E4M3)
    grad2 = target.reshape(len(rows), -1)
    g2, _, g2_next = oracle.step(grad2, second.output_grad, oracle.E5M2)
    dh = product(g2, k2.T, g2_next.scale, k2_next.scale, BF16).astype(np.float32)
    grad1 = activation(dh, size, pin, -7).reshape(len(rows), -1)
    g1, _, g1_next = oracle.step(grad1, first.output_grad, oracle.E5M2)
    of_weights = {
        "w1": product(x1.T, g1, x1_next.scale, g1_next.scale),
        "w2": product(x2.T, g2, x2_next.scale, g2_next.scale),
    }
    states = {
        "w1": oracle.LayerState(x1_next, k1_next, g1_next),
        "w2": oracle.LayerState(x2_next, k2_next, g2_next),
    }
    return of_weights, states


def next_weight(w, g):
    """A step of 1/4s; the largest weight goes from 7/4 to 7/2 and back. Where g is not
    finite w stays.
    """
    with np.errstate(invalid="ignore"):
        new = np.where(
            np.abs(w) > 1,
            np.float32(5.25) - w,
            np.clip(w - np.rint(g / 128) / 4, -0.75, 0.75),
        )
    return np.where(np.isfinite(g), new, w).astype(np.float32)


def step(run: Run, event) -> Run:
    found = [gradient(run, batch) for batch in event.batches]
    total = {
        name: sum(g[name] for g, _ in found[1:]) + found[0][0][name]
        for name in run.weights
    }
    state = {name: merged([s[name] for _, s in found]) for name in run.state}
    if event.trainer == "skipping" and not all(
        np.isfinite(g).all() for g in total.values()
    ):
        return run
    return Run(
        {name: next_weight(run.weights[name], total[name]) for name in run.weights},
        state,
    )
