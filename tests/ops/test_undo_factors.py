"""undo_factors: the custom call of CPUs has the bits of the reference, for rows of
every kind. `train/test_update_state.py` has the rules.
"""

import jax
import numpy as np
import pytest
from equality import assert_same_bits

from jaxfp8 import ops
from jaxfp8.ops import _ffi

F32 = np.float32
ROWS = 600
FACTORS = F32([1, 1, 1.004, 2, 3, 0.5, 2.0**-20, 2.0**100, 1.02, 0.7, -1])
FP8_MAX = F32([448, 57344, 448 / np.sqrt(2)])
HARD = F32([0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-126, 3e38, -1])


def rows(length, seed=0):
    """Old states and cotangents: of a step, times a factor, or stored already; some
    histories are empty, some numbers hard.
    """
    rng = np.random.default_rng(seed)
    history = rng.lognormal(0, 2, (ROWS, length)).astype(F32)
    history[rng.random(ROWS) < 0.2] = 0
    amax = rng.lognormal(0, 2, (ROWS, 1)).astype(F32)
    scale = rng.choice(F32([1, 0.3, 2.0**-7]), (ROWS, 1))
    current = amax / rng.choice(FP8_MAX, (ROWS, 1))
    is_stored = rng.random((ROWS, 1)) < 0.15
    factor = np.where(is_stored, F32(1), rng.choice(FACTORS, (ROWS, 1)))
    rolled = np.concatenate([amax, history[:, 2:], history[:, :1]], axis=1)
    stored = np.concatenate([amax, history[:, 1:]], axis=1)
    new_history = np.where(is_stored, stored, rolled[:, :length] * factor)
    is_current = ~is_stored & (rng.random((ROWS, 1)) < 0.5)
    new_scale = np.where(is_current, current, scale) * factor
    arrays = [x.astype(F32) for x in (history, scale, new_history, new_scale)]
    for array in arrays:
        is_hard = rng.random(array.shape) < 0.01
        array[is_hard] = rng.choice(HARD, is_hard.sum())
    return arrays


@pytest.mark.skipif(not _ffi.is_loaded("cpu"), reason="no CPU library")
@pytest.mark.parametrize("length", [1, 2, 3, 16, 300])
def test_bits(length):
    arrays = rows(length)
    results = {}
    for name in ("ffi", "reference"):
        with ops.implementation(name):
            results[name] = jax.jit(ops.undo_factors)(*arrays)
    assert_same_bits(results["ffi"], results["reference"])
    _, scale_inv, stays, factor = map(np.asarray, results["reference"])
    assert 0.05 < (stays == 0).mean() < 0.98, "rows of both kinds"
    assert np.isnan(factor).any(), "and rows below zero"
    assert (scale_inv < 0).any() or length == 1, "and factors that nobody undoes"
