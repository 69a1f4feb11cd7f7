"""examples/nnx_language_model.py: what makes its comparison fair."""

import chex
import jax
from flax import nnx

NAME = "nnx_language_model"


def test_arms_start_from_the_same_weights(example):
    """Parameters and optimizer state are the same trees."""
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
