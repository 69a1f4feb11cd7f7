"""Random arrays."""

import numpy as np


def normal(*shape, seed=0):
    """f32 of the standard normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
