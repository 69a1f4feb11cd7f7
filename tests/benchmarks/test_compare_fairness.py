"""Arms of `benchmarks/compare.py` start from equal weights and optimizers."""

import _compare_training
import chex
import jax
import numpy as np
import pytest
from _compare_arms import ARMS
from _compare_model import LanguageModel

import jaxfp8

LENGTH, VOCABULARY = 16, 50


pytestmark = pytest.mark.usefixtures("as_users_have_jax")


def state_of(name, seed=3):
    arm = ARMS[name]
    model = LanguageModel(VOCABULARY, LENGTH, arm.dtype, width=32, layers=1)
    return _compare_training.create_state(
        arm, model, seed, _compare_training.make_optimizer(100)
    )


def test_arms_start_from_the_same_weights():
    reference = state_of("bf16")
    assert set(reference.params) == {"params"}
    for name in ARMS:
        state = state_of(name)
        chex.assert_trees_all_equal(state.params["params"], reference.params["params"])
        # The optimizer, its clipping and its weight decay see the parameters and
        # nothing else.
        assert len(jax.tree.leaves(state.opt_state)) == len(
            jax.tree.leaves(reference.opt_state)
        ), name
        assert (jaxfp8.OVERWRITE_WITH_GRADIENT in state.params) == (name == "delayed")
        assert (state.loss_scale is not None) == (name == "f16")
    other = state_of("bf16", seed=4).params["params"]["logits"]["kernel"]
    assert not np.array_equal(other, reference.params["params"]["logits"]["kernel"])
