"""examples/equinox_language_model.py: what makes its comparison fair."""

import equinox as eqx
import jax
import numpy as np
import oracle

NAME = "equinox_language_model"


def test_arms_start_from_the_same_weights_and_train(example, monkeypatch):
    """Parameters and optimizer state are the same arrays; in the FP8 arm every
    quantizer moves in every step.
    """
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

    model, opt_state = arms["jaxfp8"]
    for batch in np.random.default_rng(0).integers(0, 50, (2, 2, 17)):
        model, opt_state, loss = example.train_step(model, opt_state, tx, batch)
        assert np.isfinite(loss)
    layers = [
        layer
        for block in model.blocks
        for layer in (block.qkv, block.out, block.up, block.down)
    ]
    histories = [
        leaf
        for layer in layers
        for leaf in jax.tree.leaves(layer.state)
        if leaf.shape != (1,)
    ]
    assert len(histories) == 3 * 4 * example.LAYERS
    # That is roll(-1): slot 0 newest, the one before at the end.
    assert all(
        history[0] > 0 and history[-1] > 0 and not history[1:-1].any()
        for history in histories
    )
