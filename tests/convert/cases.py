"""What the tests of converters share: random state and variables."""

import numpy as np
from programs.known_amax import OPERANDS

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
