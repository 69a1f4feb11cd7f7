"""State that has to fit a changed model: another history length, layers that the
checkpoint lacks.
"""

import jax
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from flax import nnx

import jaxfp8
from jaxfp8 import convert

from .cases import OWG, model_variables


def histories(length, amaxes):
    """The history after each step of a run, by the oracle."""
    state = oracle.State.init(length)
    after = []
    for amax in amaxes:
        state = oracle.next_state(state, np.float32(1), np.float32(amax))
        after.append(state.amax_history)
    return after


def by_age(history):
    """Newest first."""
    return [history[0], *history[:0:-1]]


def resized(history, length):
    pair = {"input_amax_history": history, "input_scale": np.ones(1, np.float32)}
    return np.asarray(convert.resize_history(pair, length)["input_amax_history"])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
@pytest.mark.parametrize("new_length", [1, 2, 3, 8, 13])
def test_resized_as_if_the_run_had_had_that_length(length, new_length):
    """At every step: shorter, it is the history of the short run. Longer, it is that of
    the long run until the first amax is dropped, and from then on its newest `length`
    entries.
    """
    amaxes = np.arange(1, 31, dtype=np.float32)
    runs = {n: histories(n, amaxes) for n in (length, new_length)}
    for t, (old, new) in enumerate(zip(runs[length], runs[new_length], strict=True)):
        got = resized(old, new_length)
        assert got.dtype == np.float32
        known = min(length, new_length)
        assert by_age(got) == by_age(new)[:known] + [0] * (new_length - known), (
            f"step {t}"
        )
        if new_length <= length or t < length:
            oracle.assert_bitwise(got, new, f"step {t}")


# ----------------------------------------------------------------------- changed models


def test_merge_keeps_what_the_checkpoint_has():
    new = model_variables(seed=7)
    old = model_variables(seed=8)
    assert_same_bits(convert.merge_state(new, old), old, "same model")
    bf16 = {"params": old["params"], "batch_stats": {"mean": np.ones(2, np.float32)}}
    assert_same_bits(
        convert.merge_state(new, bf16),
        {**bf16, OWG: new[OWG]},
        "bfloat16 checkpoint, FP8 model",
    )
    assert_same_bits(
        convert.merge_state({"params": new["params"]}, bf16), bf16, "no FP8 anywhere"
    )
    counters = {"input_counters": np.zeros(3, np.float32)}  # of releases until 0.2
    counted = {
        name: {"Fp8DotGeneral_0": layer["Fp8DotGeneral_0"] | counters}
        for name, layer in old[OWG].items()
    }
    assert_same_bits(convert.merge_state(new, {**old, OWG: counted}), old, "counters")
    one = {**old, OWG: {"Dense_1": old[OWG]["Dense_1"]}}
    expected = {
        **old,
        OWG: {"Dense_0": new[OWG]["Dense_0"], "Dense_1": old[OWG]["Dense_1"]},
    }
    assert_same_bits(
        convert.merge_state(new, one), expected, "a layer that is new in FP8"
    )


def test_merge_fits_length_and_dtype():
    new = model_variables(seed=7, length=6, lead=(2,))
    old = model_variables(seed=8, length=4, lead=(2,))
    expected = convert.resize_history(old, 6)
    assert_same_bits(convert.merge_state(new, old), expected, "a longer history")
    narrow = jax.tree.map(lambda leaf: leaf.astype(oracle.BF16), old[OWG])
    got = convert.merge_state(new, {**old, OWG: narrow})[OWG]
    assert_same_bits(
        got,
        convert.resize_history(jax.tree.map(oracle.widen, narrow), 6),
        "cast to bfloat16",
    )


def nnx_trees(length):
    """What holds the state of an NNX model: pure arrays, variables, and a restored
    checkpoint of variables.
    """
    recipe = jaxfp8.DelayedScaling(amax_history_len=length)
    layer = nnx.Linear(
        8, 4, rngs=nnx.Rngs(0), dot_general=jaxfp8.nnx.Fp8DotGeneral(recipe)
    )
    pure = nnx.to_pure_dict(nnx.state(layer))
    return [pure, nnx.state(layer), jax.tree.map(lambda leaf: {"value": leaf}, pure)]


@pytest.mark.parametrize("kind", range(3), ids=["pure", "variables", "restored"])
def test_trees_of_nnx(kind):
    """merge_state is for collections: it refuses NNX's trees, in which it would merge
    nothing.
    """
    tree = nnx_trees(4)[kind]
    lengths = {
        leaf.shape[0]
        for leaf in jax.tree.leaves(convert.resize_history(tree, 6)["dot_general"])
    }
    assert lengths == {6, 1}
    assert len(jaxfp8.inspect.summary(tree).rows) == 3
    assert jax.tree.structure(convert.reset_state(tree)) == jax.tree.structure(tree)
    message = (
        "expected FP8 state in the collection _overwrite_with_gradient of "
        "Linen.*nnx.update.*resize_history"
    )
    bfloat16 = nnx.to_pure_dict(nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0))))
    for name, arguments in {
        "variables": (tree, bfloat16),
        "restored": (bfloat16, tree),
    }.items():
        with pytest.raises(ValueError, match=f"merge_state: {name}: {message}"):
            convert.merge_state(*arguments)
