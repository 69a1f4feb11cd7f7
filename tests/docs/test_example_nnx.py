"""examples/nnx_language_model.py: what makes its comparison fair."""

import chex
import jax
import numpy as np
from flax import nnx

import jaxfp8.nnx

NAME = "nnx_language_model"


def test_arms_start_from_the_same_weights_and_train(example):
    """Parameters and optimizer state are the same trees; in the FP8 arm every quantizer
    moves in every step.
    """
    arms = {
        name: example.create(make, 50, seed=3, steps=4)
        for name, make in example.ARMS.items()
    }
    params = {
        name: nnx.to_pure_dict(nnx.state(model, nnx.Param))
        for name, (model, _) in arms.items()
    }
    chex.assert_trees_all_equal(params["bf16"], params["jaxfp8"])
    sizes = {
        len(jax.tree.leaves(nnx.state(optimizer))) for _, optimizer in arms.values()
    }
    assert len(sizes) == 1, "the optimizer sees parameters alone"

    model, optimizer = arms["jaxfp8"]
    batches = np.random.default_rng(0).integers(0, 50, (2, 2, 17))
    for batch in batches:
        assert np.isfinite(example.train_step(model, optimizer, batch))
    state = nnx.to_pure_dict(nnx.state(model, jaxfp8.nnx.OverwriteWithGradient))
    histories = [leaf for leaf in jax.tree.leaves(state) if leaf.shape != (1,)]
    assert len(histories) == 3 * 4 * example.LAYERS
    assert all(
        history[0] > 0 and history[-1] > 0 and not history[1:-1].any()
        for history in histories
    )
    # That is roll(-1): slot 0 newest, the one before at the end.
