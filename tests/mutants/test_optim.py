"""Steps of Adam with flaws: each must turn a test of `adamw` red."""

import functools

import jax
import pytest
from optim import test_adam
from parametrize import each_row

from jaxfp8.optim import _adam

pytestmark = [
    pytest.mark.usefixtures("promotion_as_optax_wants"),
    pytest.mark.usefixtures("nothing_stays_traced"),
]

oracle = functools.partial(test_adam.test_steps_are_those_of_the_oracle, (64, 256))
clipped = functools.partial(test_adam.test_max_norm_clips_as_optax, 0.5, True)
key, clip_factor, step = _adam.leaf_key, _adam._clip_factor, _adam.ops.adam_update


def with_numbers(change, leaves, axes):
    """A step with other numbers."""
    return step([leaf._replace(numbers=change(leaf.numbers)) for leaf in leaves], axes)


def exchanged(leaves, axes):
    return [(out, nu, mu) for out, mu, nu in step(leaves, axes)]


# What is changed, and what must see it. Of 11 numbers 5 is the correction of squares, 9
# the decay.
MUTANTS = {
    "moments draw the same bits": (
        _adam,
        "leaf_key",
        lambda seed, count, leaf: key(seed, count, 0 * leaf + 1),
        oracle,
    ),
    "steps draw the same bits": (
        _adam,
        "leaf_key",
        lambda seed, count, leaf: key(seed, 0 * count, leaf),
        oracle,
    ),
    "moments are exchanged": (_adam.ops, "adam_update", exchanged, oracle),
    "squares are not corrected": (
        _adam.ops,
        "adam_update",
        functools.partial(with_numbers, lambda x: x.at[5].set(1)),
        oracle,
    ),
    "nothing decays": (
        _adam.ops,
        "adam_update",
        functools.partial(with_numbers, lambda x: x.at[9].set(0)),
        oracle,
    ),
    "everything decays": (
        _adam,
        "_masked",
        lambda mask, params: [True] * len(jax.tree.leaves(params)),
        test_adam.test_masks_schedules_and_traced_numbers,
    ),
    "a leaf is clipped by its own norm": (
        _adam,
        "_clip_factor",
        lambda grads, max_norm: clip_factor(grads[-1:], max_norm),
        clipped,
    ),
}


@each_row("owner, name, mutant, check", MUTANTS)
def test_mutants_are_seen(monkeypatch, owner, name, mutant, check):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        check()
