"""Loss scaling with the flaws that people's own has had: each must turn a test of this
folder red.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mixed_precision import test_finite, test_loss_scale, test_training, trainers
from parametrize import each_row

from jaxfp8 import mixed_precision
from jaxfp8.mixed_precision import DynamicLossScale, _floats

pytestmark = [
    pytest.mark.usefixtures("promotion_as_optax_wants"),
    pytest.mark.usefixtures("nothing_stays_traced"),
]
OURS = trainers.MAKERS["our TrainState"]


# ------------------------------------------------------------------------------- checks


in_float16, in_fp8 = (
    functools.partial(test_training.run, OURS, fp8) for fp8 in (False, True)
)
adam, adam_in_fp8 = (
    functools.partial(test_training.test_a_skipped_step_leaves_everything, OURS, fp8)
    for fp8 in (False, True)
)
dynamics = test_loss_scale.test_the_worked_example
random_steps = functools.partial(
    test_loss_scale.test_thousands_of_random_steps, {"growth_interval": 3}, 0.05
)
bounds = test_loss_scale.test_never_zero_and_never_infinite
devices = functools.partial(
    test_finite.test_gradients_that_differ_in_shard_map, False, (8,), True
)
infinities = functools.partial(test_finite.test_one_bad_value, np.inf, np.float32)
state_of_a_tree = test_loss_scale.test_what_is_no_gradient_stays


# ------------------------------------------------------------------------------ mutants


def adjusted(**change):
    """`adjust` followed by a change to what it returns, computed from before and
    after.
    """
    right = DynamicLossScale.adjust

    def adjust(self, finite):
        after = right(self, finite)
        return dataclasses.replace(
            after, **{name: f(self, after, finite) for name, f in change.items()}
        )

    return DynamicLossScale, "adjust", adjust


def interval_plus_one(before, after, finite):
    grown = (before.good_steps >= before.growth_interval) & finite
    return jnp.where(
        grown, before.value * 2, jnp.where(finite, before.value, after.value)
    )


def unbounded(before, after, finite):
    return jnp.where(finite, before.value * 2, before.value * 0.5)


def in_half(self, tree):
    return _floats.map_outside_state(
        lambda leaf: (
            leaf.astype(jnp.float16) * (1 / self.value).astype(jnp.float16)
        ).astype(jnp.float32),
        tree,
    )


def unscaled_everywhere(self, tree):
    return jax.tree.map(
        lambda leaf: leaf / self.value if _floats.is_float(leaf) else leaf, tree
    )


def nothing(self, tree):
    return tree


def params_alone(finite, new, old):
    """What `jnp.where` over the parameters does: optimizer state, step and FP8 state
    are those of the bad step.
    """
    keep = functools.partial(jax.tree.map, lambda a, b: lax.select(finite, a, b))
    return new.replace(
        params={
            **new.params,
            "params": keep(new.params["params"], old.params["params"]),
        }
    )


def state_left_behind(finite, new, old):
    both = _floats.select(finite, new, old)
    return both.replace(params={**new.params, "params": both.params["params"]})


def this_device_alone(x):
    return ()


def nan_alone(tree):
    return jnp.logical_not(
        jnp.any(
            jnp.stack([jnp.isnan(leaf).any() for leaf in _floats._gradients(tree)[1]])
        )
    )


MUTANTS = {
    "forgets to unscale": (in_float16, DynamicLossScale, "unscale", nothing),
    "forgets to scale": (in_float16, DynamicLossScale, "scale", nothing),
    "unscales in float16": (in_float16, DynamicLossScale, "unscale", in_half),
    # In a run `update_state` finds and undoes it.
    "unscales FP8 state": (
        state_of_a_tree,
        DynamicLossScale,
        "unscale",
        unscaled_everywhere,
    ),
    "grows one step late": (dynamics, *adjusted(value=interval_plus_one)),
    "keeps the counter": (
        random_steps,
        *adjusted(good_steps=lambda before, after, finite: before.good_steps + 1),
    ),
    "keeps the counter after an overflow": (
        random_steps,
        *adjusted(
            good_steps=lambda b, a, finite: jnp.where(
                finite, a.good_steps, b.good_steps
            )
        ),
    ),
    "shrinks without end": (bounds, *adjusted(value=unbounded)),
    "never skips": (
        in_float16,
        mixed_precision,
        "select",
        lambda finite, new, old: new,
    ),
    "skips parameters alone": (in_fp8, mixed_precision, "select", params_alone),
    "skips parameters alone, float16": (adam, mixed_precision, "select", params_alone),
    "does not skip FP8 state": (
        adam_in_fp8,
        mixed_precision,
        "select",
        state_left_behind,
    ),
    "sees NaN alone": (infinities, test_finite, "all_finite", nan_alone),
    "asks this device alone": (devices, _floats, "_differing_axes", this_device_alone),
}


@each_row("check, owner, name, mutant", MUTANTS)
def test_mutant_is_caught(check, owner, name, mutant, monkeypatch):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        check()


def test_adjusting_inside_the_microbatches_is_caught():
    """What is summed was scaled by different factors then."""
    inside = functools.partial(test_training.scaled_sums, adjust_inside=True)
    with pytest.raises(AssertionError):
        test_training.accumulate(OURS, False, inside)
