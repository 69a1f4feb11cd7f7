"""The oracle of moments of any shape: rows of blocks, and the keys of their random
bits, for `oracle_moments`.
"""

import jax
import numpy as np
from oracle import moments as oracle_moments


def on_rows(function, axis, shape, *trees):
    """Call a function of matrices, in whose rows blocks lie, with arrays whose blocks
    lie along `axis`.
    """
    others = [size for i, size in enumerate(shape) if i != axis]

    def as_rows(x):
        x = np.moveaxis(x, axis, -1)
        return x.reshape(-1, x.shape[-1])

    def back(x):
        return np.moveaxis(x.reshape(*others, x.shape[-1]), -1, axis)

    return jax.tree.map(back, function(*jax.tree.map(as_rows, trees)))


def blocks(shape, axis):
    """The shape of amaxes."""
    return tuple(-(-size // 128) if i == axis else size for i, size in enumerate(shape))


def keys(seed, step, leaf, shape, axis):
    """Of blocks in the row-major order of their amaxes."""
    mix = oracle_moments.mix
    number = np.arange(np.prod(blocks(shape, axis)), dtype=np.uint32)
    with np.errstate(over="ignore"):
        key = mix(mix(mix(np.uint32(seed)) ^ np.uint32(step)) ^ np.uint32(leaf))
        return mix(key ^ number).reshape(blocks(shape, axis))


def encode(kind, x, axis, keys):
    """Return `(data, amax, exponent)` of a moment."""

    def function(after, keys):
        data, *of_blocks = oracle_moments.encode_all(after, keys, kind == "squared")
        if kind == "squared":  # in which NaN with a sign stands for Inf
            codes = np.where(np.isposinf(after), 0xFF, data.view(np.uint8))
            data = codes.astype(np.uint8).view(data.dtype)
        return data, *of_blocks

    return on_rows(function, axis, x.shape, x, keys)


def decode(data, amax, exponent, axis):
    """Return the f32 elements of a moment."""
    return on_rows(oracle_moments.decode, axis, data.shape, data, amax, exponent)
