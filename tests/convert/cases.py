"""What the tests of converters share: random state, QTensors and variables, and the
comparison of trees.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from programs.known_amax import OPERANDS

import jaxfp8

E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu
OWG = "_overwrite_with_gradient"


def state_leaves(seed, length=4, lead=()):
    """Random state of one product under the stored names; numpy, so that nothing of JAX
    can round it.
    """
    rng = np.random.default_rng(seed)
    state = {}
    for operand in OPERANDS:
        state[f"{operand}_amax_history"] = rng.lognormal(size=(*lead, length)).astype(
            np.float32
        )
        state[f"{operand}_scale"] = rng.lognormal(size=(*lead, 1)).astype(np.float32)
    return state


def model_variables(seed=6, length=4, layers=("Dense_0", "Dense_1"), lead=()):
    rng = np.random.default_rng(seed)
    return {
        "params": {
            layer: {"kernel": rng.normal(size=(2, 2)).astype(np.float32)}
            for layer in layers
        },
        OWG: {
            layer: {"Fp8DotGeneral_0": state_leaves(seed + i, length, lead)}
            for i, layer in enumerate(layers)
        },
    }


@dataclasses.dataclass(frozen=True)
class QArray:
    """The fields of qwix 0.1.8."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None


def qtensor(shape, block, *, cols=1, batch=0, dtype=np.float32):
    """Random codes with a scale for each block of matrices."""
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.standard_normal(shape).astype(np.float32)).astype(E4M3)
    first = len(shape) - cols
    if block is None:
        return jaxfp8.QTensor(codes, jnp.asarray([0.37], jnp.float32), cols=cols)
    sizes = np.prod(shape[batch:first]), np.prod(shape[first:])
    counts = [
        -(-int(size) // (step or int(size)))
        for size, step in zip(sizes, block, strict=True)
    ]
    scales = (
        2.0 ** rng.integers(-6, 6, (*shape[:batch], *counts))
        if dtype == E8M0
        else rng.uniform(1, 9, (*shape[:batch], *counts))
    )
    return jaxfp8.QTensor(
        codes, jnp.asarray(scales, jnp.float32).astype(dtype), block=block, cols=cols
    )
