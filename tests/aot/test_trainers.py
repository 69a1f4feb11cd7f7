"""What a whole training step costs on an H200, the update of parameters and FP8 state
included.
"""

import numpy as np

PROGRAM = "trainers"


def test_launches_of_a_step(report):
    """No more than with Flax's TrainState, which overwrites the state without a look at
    it.

    The state of all layers is one reduction and one kernel that writes: 64 quantizers
    share a call.
    """
    for layers in (4, 12):
        assert (
            report[f"jaxfp8, {layers}"]["launches"]
            <= report[f"flax, {layers}"]["launches"]
        ), layers
        assert (
            report[f"jaxfp8, {layers}"]["writes"]
            == report[f"flax, {layers}"]["writes"] + 1
        )
    per_layer = (report["jaxfp8, 12"]["launches"] - report["jaxfp8, 4"]["launches"]) / 8
    assert per_layer <= 11


def test_stacked_state(report):
    """Six arrays of state, however many layers, with one launch to read them and one to
    write them, in place of one a layer.
    """
    for layers in (4, 12):
        stacked, plain = report[f"stacked, {layers}"], report[f"jaxfp8, {layers}"]
        spared = [6 * (layers - 1)] * 2
        assert np.subtract(plain["buffers"], stacked["buffers"]).tolist() == spared
        assert stacked["launches"] <= plain["launches"] - 2 * (layers - 1)
        # in the gradient, and in update_state
        assert stacked["writes"] == 2
