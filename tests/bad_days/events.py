"""What happens to the tensors of a step: the events of the soak, and the bad numbers of
the rows.
"""

import numpy as np

SPIKE = np.float32(2.0**13)  # 8192; a power of two keeps the soak's sums exact
BAD_NUMBERS = (np.nan, np.inf, -np.inf)
# Name -> by what x and the gradient are multiplied, and which numbers one element of
# either becomes.
EVENTS = {
    "ordinary": (1, 1, ()),
    "spike in x": (SPIKE, 1, ()),
    "spike in grad": (1, SPIKE, ()),
    "tiny": (1 / SPIKE, 1 / SPIKE, ()),
    "NaN": (1, 1, (np.nan,)),
    "Inf": (1, 1, (-np.inf, np.inf)),
}


def apply(what: str, rng, x, grad) -> tuple:
    """x and grad after an event."""
    *factors, numbers = EVENTS[what]
    x, grad = (
        value * np.float32(factor)
        for value, factor in zip((x, grad), factors, strict=True)
    )
    if numbers:
        number = rng.choice(numbers) if len(numbers) > 1 else numbers[0]
        spoilt = x if rng.random() < 0.5 else grad
        spoilt[tuple(rng.integers(n) for n in spoilt.shape)] = number
    return x, grad
