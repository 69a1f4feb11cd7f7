"""examples/equinox_language_model.py: what makes its comparison fair."""

import equinox as eqx
import jax
import oracle

NAME = "equinox_language_model"


def test_arms_start_from_the_same_weights(example, monkeypatch):
    """Parameters and optimizer state are the same arrays."""
    monkeypatch.setattr(example, "LAYERS", 1)
    tx = example.make_optimizer(steps=4)
    arms = {
        name: example.create(recipe, 50, 3, tx)
        for name, recipe in example.RECIPES.items()
    }
    (bf16, bf16_moments), (model, moments) = (
        [jax.tree.leaves(eqx.filter(part, eqx.is_array)) for part in arm]
        for arm in arms.values()
    )
    parameters = [leaf for leaf in model if leaf.shape not in ((1,), (1024,))]
    for ours, theirs in zip(parameters, bf16, strict=True):
        oracle.assert_bitwise(ours, theirs, "initial weights")
    assert len(moments) == len(bf16_moments), "the optimizer sees parameters alone"
