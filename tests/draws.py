"""Random arrays, and a key for first values."""

import jax
import numpy as np

KEY = jax.random.key(0)


def normal(*shape, seed=0):
    """f32 of the standard normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
